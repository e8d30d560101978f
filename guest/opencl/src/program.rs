//! Programs and kernels.

use std::{
    ffi::{c_char, c_void},
    ptr::null_mut,
    sync::{Mutex, OnceLock, PoisonError},
};

use base::Unpoisoned;
use remoting_proto::{
    apis::opencl::{
        calls::{
            ArgumentKind, BuildProgram, CloneKernel, CompileProgram, CreateKernel, CreateProgram,
            DeviceId, KernelId, LinkProgram, MemId, ProgramBinaries, ProgramId, ProgramOrigin,
            SamplerId, SetArgument, Specialize, Target, Value,
        },
        codes,
    },
    wire::Blob,
};

use crate::{
    abi::{self, Outcome, array, bytes, copy, entry_points, give, handle, list, same, set, text},
    include::{self, Included},
    link,
    object::{
        self, Context, Device, Handle, Kernel, Mem, Object, Own, Program, Sampler, Set, get,
        keep_all,
    },
    platform::ask,
};

type Notify = Option<extern "C" fn(Handle<Program>, *mut c_void)>;

fn create(
    context: &Object<Context>,
    devices: Vec<Own<Device>>,
    origin: ProgramOrigin,
) -> Outcome<(Handle<Program>, Vec<i32>)> {
    let link = link::connected()?;
    let id = ProgramId(link.state.ids.programs.take());
    let source = match &origin {
        ProgramOrigin::Source(Blob(text)) => text.clone(),
        _ => Vec::new(),
    };
    let asked = link.ask(&CreateProgram {
        id,
        context: context.it.id,
        origin,
    });
    let program = Object::handle(Program {
        id,
        context: context.keep(),
        devices,
        source,
        options: Mutex::default(),
    });
    match asked {
        Ok(statuses) => Ok((program, statuses)),
        Err(code) => {
            object::release(program)?;
            Err(code)
        }
    }
}

pub extern "C" fn clCreateProgramWithSource(
    context: Handle<Context>,
    count: u32,
    strings: *const *const c_char,
    lengths: *const usize,
    errcode_ret: *mut i32,
) -> Handle<Program> {
    let call = || {
        let context = get(context)?;
        let strings = array(strings, count as usize);
        if strings.is_empty() || strings.iter().any(|string| string.is_null()) {
            return Err(codes::INVALID_VALUE);
        }
        let lengths = array(lengths, strings.len());
        let mut source = Vec::new();
        for (index, &string) in strings.iter().enumerate() {
            match lengths.get(index) {
                Some(&length) if length > 0 => source.extend(array(string.cast::<u8>(), length)),
                _ => source.extend(text(string)),
            }
        }
        let devices = context.it.devices.clone();
        create(context, devices, ProgramOrigin::Source(Blob(source)))
    };
    handle(|| call().map(|(program, _)| program), errcode_ret)
}

entry_points! {
    fn clCreateProgramWithBinary(
        context: Handle<Context>, count: u32, devices: *const Handle<Device>, lengths: *const usize,
        binaries: *const *const u8, statuses: *mut i32
    ) -> Handle<Program> {
        let context = get(context)?;
        let devices = keep_all(&array(devices, count as usize))?;
        let (lengths, binaries) = (
            array(lengths, devices.len()),
            array(binaries, devices.len()),
        );
        if devices.is_empty() || lengths.is_empty() || binaries.is_empty() {
            return Err(codes::INVALID_VALUE);
        }
        let mut list = Vec::new();
        for (index, device) in devices.iter().enumerate() {
            if lengths[index] == 0 || binaries[index].is_null() {
                set(
                    statuses.wrapping_add(index * usize::from(!statuses.is_null())),
                    codes::INVALID_VALUE,
                );
                return Err(codes::INVALID_VALUE);
            }
            list.push((device.it.id, Blob(array(binaries[index], lengths[index]))));
        }
        let (program, got) = create(context, devices, ProgramOrigin::Binary(list))?;
        if !statuses.is_null() {
            for (index, status) in got.into_iter().enumerate() {
                set(statuses.wrapping_add(index), status);
            }
        }
        Ok(program)
    }
}

pub extern "C" fn clCreateProgramWithIL(
    context: Handle<Context>,
    il: *const c_void,
    length: usize,
    errcode_ret: *mut i32,
) -> Handle<Program> {
    let call = || {
        let context = get(context)?;
        if il.is_null() || length == 0 {
            return Err(codes::INVALID_VALUE);
        }
        let il = Blob(array(il.cast(), length));
        create(context, context.it.devices.clone(), ProgramOrigin::Il(il))
    };
    handle(|| call().map(|(program, _)| program), errcode_ret)
}

pub extern "C" fn clCreateProgramWithBuiltInKernels(
    context: Handle<Context>,
    count: u32,
    devices: *const Handle<Device>,
    names: *const c_char,
    errcode_ret: *mut i32,
) -> Handle<Program> {
    let call = || {
        let context = get(context)?;
        let devices = keep_all(&array(devices, count as usize))?;
        if devices.is_empty() || names.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        let ids = devices.iter().map(|device| device.it.id).collect();
        create(
            context,
            devices,
            ProgramOrigin::BuiltIn(ids, Blob(text(names))),
        )
    };
    handle(|| call().map(|(program, _)| program), errcode_ret)
}

entry_points! {
    fn clRetainProgram(program: Handle<Program>) {
        object::retain(program)
    }

    fn clReleaseProgram(program: Handle<Program>) {
        object::release(program)
    }
}

fn device_ids(count: u32, devices: *const Handle<Device>) -> Outcome<Vec<DeviceId>> {
    list(devices, count, codes::INVALID_VALUE)?
        .into_iter()
        .map(|device| Ok(get(device)?.it.id))
        .collect()
}

/// The options for the worker, and the headers that a source needs from folders on this machine.
fn included(program: &Program, headers: &[Own<Program>], options: *const c_char) -> Included {
    let options = text(options);
    let texts = std::iter::once(&program.source).chain(headers.iter().map(|of| &of.it.source));
    let source = texts.map(Vec::as_slice).collect::<Vec<_>>().join(&b'\n');
    let gathered = include::gather(&source, &options);
    let mut kept = program.options.lock_unpoisoned();
    if let Some(gathered) = gathered {
        *kept = Some(options);
        return gathered;
    }
    *kept = None;
    Included {
        options,
        ..Included::default()
    }
}

/// Runs a build now, or in a thread of its own if the caller wants to be notified of its end.
fn run(
    program: &Object<Program>,
    notify: Notify,
    data: *mut c_void,
    work: impl FnOnce() -> Outcome + Send + 'static,
) -> Outcome {
    let Some(notify) = notify else {
        if !data.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        return work();
    };
    let (kept, data) = (program.keep(), data as usize);
    let started = std::thread::Builder::new().spawn(move || {
        // The application queries the result.
        let _ = work();
        notify(kept.pointer(), data as *mut c_void);
    });
    match started {
        Ok(_) => Ok(()),
        Err(_) => Err(codes::OUT_OF_HOST_MEMORY),
    }
}

entry_points! {
    fn clBuildProgram(
        program: Handle<Program>, count: u32, devices: *const Handle<Device>, options: *const c_char,
        notify: Notify, data: *mut c_void
    ) {
        let program = get(program)?;
        let included = included(&program.it, &[], options);
        let call = BuildProgram {
            id: program.it.id,
            devices: device_ids(count, devices)?,
            options: Blob(included.options),
            folders: included.folders,
            included: included.headers,
        };
        run(program, notify, data, move || link::connected()?.ask(&call))
    }

    fn clCompileProgram(
        program: Handle<Program>, count: u32, devices: *const Handle<Device>, options: *const c_char,
        header_count: u32, headers: *const Handle<Program>, names: *const *const c_char, notify: Notify,
        data: *mut c_void
    ) {
        let program = get(program)?;
        let headers = keep_all(&list(headers, header_count, codes::INVALID_VALUE)?)?;
        let included = included(&program.it, &headers, options);
        let names = list(names, header_count, codes::INVALID_VALUE)?;
        let headers = headers
            .into_iter()
            .zip(names)
            .map(|(header, name)| (header.it.id, Blob(text(name))))
            .collect();
        let call = CompileProgram {
            id: program.it.id,
            devices: device_ids(count, devices)?,
            options: Blob(included.options),
            folders: included.folders,
            included: included.headers,
            headers,
        };
        run(program, notify, data, move || link::connected()?.ask(&call))
    }
}

pub extern "C" fn clLinkProgram(
    context: Handle<Context>,
    count: u32,
    devices: *const Handle<Device>,
    options: *const c_char,
    input_count: u32,
    inputs: *const Handle<Program>,
    notify: Notify,
    data: *mut c_void,
    errcode_ret: *mut i32,
) -> Handle<Program> {
    let call = || {
        let context = get(context)?;
        if notify.is_none() && !data.is_null() || input_count == 0 {
            return Err(codes::INVALID_VALUE);
        }
        let own = match list(devices, count, codes::INVALID_VALUE)? {
            none if none.is_empty() => context.it.devices.clone(),
            some => keep_all(&some)?,
        };
        let inputs = list(inputs, input_count, codes::INVALID_VALUE)?
            .into_iter()
            .map(|input| Ok(get(input)?.it.id))
            .collect::<Outcome<_>>()?;
        let link = link::connected()?;
        let id = ProgramId(link.state.ids.programs.take());
        let asked = link.ask(&LinkProgram {
            id,
            context: context.it.id,
            devices: device_ids(count, devices)?,
            options: Blob(text(options)),
            inputs,
        });
        let program = Object::handle(Program {
            id,
            context: context.keep(),
            devices: own,
            source: Vec::new(),
            options: Mutex::default(),
        });
        match asked {
            Ok((code, true)) => Ok((program, code)),
            Ok((code, false)) | Err(code) => {
                object::release(program)?;
                Err(code)
            }
        }
    };
    match abi::run(call) {
        Ok((program, code)) => {
            set(errcode_ret, if notify.is_some() { 0 } else { code });
            if let Some(notify) = notify {
                notify(program, data);
            }
            program
        }
        Err(code) => {
            set(errcode_ret, code);
            null_mut()
        }
    }
}

entry_points! {
    fn clGetProgramInfo(
        program: Handle<Program>, name: u32, size: usize, value: *mut c_void, size_ret: *mut usize
    ) {
        let program = get(program)?;
        let it = &program.it;
        let answer = match name {
            codes::PROGRAM_REFERENCE_COUNT => bytes(&[program.count()]),
            codes::PROGRAM_CONTEXT => bytes(&[it.context.pointer()]),
            codes::PROGRAM_NUM_DEVICES => bytes(&[it.devices.len() as u32]),
            codes::PROGRAM_DEVICES => bytes(
                &it.devices
                    .iter()
                    .map(|device| device.pointer())
                    .collect::<Vec<_>>(),
            ),
            codes::PROGRAM_BINARIES => return binaries(program, size, value, size_ret),
            _ => ask(Target::Program(it.id), name)?,
        };
        give(&answer, size, value, size_ret)
    }
}

/// The caller passes an array of pointers to buffers of the sizes that it was told.
fn binaries(
    program: &Object<Program>,
    size: usize,
    value: *mut c_void,
    size_ret: *mut usize,
) -> Outcome {
    let needed = program.it.devices.len() * size_of::<*mut u8>();
    set(size_ret, needed);
    if value.is_null() {
        return Ok(());
    }
    if size < needed {
        return Err(codes::INVALID_VALUE);
    }
    let pointers = array(value.cast::<*mut u8>(), program.it.devices.len());
    let binaries = link::connected()?.ask(&ProgramBinaries { id: program.it.id })?;
    for (pointer, Blob(binary)) in pointers.into_iter().zip(binaries) {
        if !pointer.is_null() {
            give(&binary, binary.len(), pointer.cast(), null_mut())?;
        }
    }
    Ok(())
}

entry_points! {
    fn clGetProgramBuildInfo(
        program: Handle<Program>, device: Handle<Device>, name: u32, size: usize, value: *mut c_void,
        size_ret: *mut usize
    ) {
        let (program, device) = (get(program)?, get(device)?);
        let mut answer = ask(Target::Build(program.it.id, device.it.id), name)?;
        let own = program.it.options.lock();
        if let (codes::PROGRAM_BUILD_OPTIONS, Some(options)) =
            (name, &*own.unwrap_or_else(PoisonError::into_inner))
        {
            answer.clone_from(options);
            answer.push(0);
        }
        give(&answer, size, value, size_ret)
    }

    fn clSetProgramSpecializationConstant(
        program: Handle<Program>, constant: u32, size: usize, value: *const c_void
    ) {
        let program = get(program)?;
        // A null value is for the host's driver to refuse, which first checks that the program has
        // constants.
        link::connected()?.ask(&Specialize {
            id: program.it.id,
            constant,
            value: Blob(array(value.cast(), size)),
        })
    }
}

fn kernel(program: &Object<Program>, name: Vec<u8>) -> Outcome<Handle<Kernel>> {
    let link = link::connected()?;
    let id = KernelId(link.state.ids.kernels.take());
    let asked = link.ask(&CreateKernel {
        id,
        program: program.it.id,
        name: Blob(name),
    });
    let known = |kind| match kind {
        ArgumentKind::Unknown() => OnceLock::new(),
        kind => OnceLock::from(kind),
    };
    let (kinds, failed): (Vec<_>, _) = match asked {
        Ok(kinds) => (kinds.into_iter().map(known).collect(), None),
        Err(code) => (Vec::new(), Some(code)),
    };
    let kernel = Object::handle(Kernel {
        id,
        program: program.keep(),
        set: Mutex::new(vec![Set::Never; kinds.len()]),
        kinds,
    });
    if let Some(code) = failed {
        object::release(kernel)?;
        return Err(code);
    }
    Ok(kernel)
}

entry_points! {
    fn clCreateKernel(program: Handle<Program>, name: *const c_char) -> Handle<Kernel> {
        let program = get(program)?;
        if name.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        kernel(program, text(name))
    }

    fn clCreateKernelsInProgram(
        program: Handle<Program>, count: u32, kernels: *mut Handle<Kernel>, count_ret: *mut u32
    ) {
        let program = get(program)?;
        let names = ask(Target::Program(program.it.id), codes::PROGRAM_KERNEL_NAMES)?;
        let names: Vec<_> = names
            .split(|&byte| byte == b';' || byte == 0)
            .filter(|name| !name.is_empty())
            .collect();
        set(count_ret, names.len() as u32);
        if kernels.is_null() {
            return Ok(());
        }
        if (count as usize) < names.len() {
            return Err(codes::INVALID_VALUE);
        }
        for (index, name) in names.into_iter().enumerate() {
            set(kernels.wrapping_add(index), kernel(program, name.to_vec())?);
        }
        Ok(())
    }

    fn clCloneKernel(source: Handle<Kernel>) -> Handle<Kernel> {
        let source = get(source)?;
        let link = link::connected()?;
        let id = KernelId(link.state.ids.kernels.take());
        let asked = link.ask(&CloneKernel {
            id,
            of: source.it.id,
        });
        let set = source.it.set.lock_unpoisoned();
        let kernel = Object::handle(Kernel {
            id,
            program: source.it.program.keep(),
            kinds: source.it.kinds.clone(),
            set: Mutex::new(set.clone()),
        });
        if let Err(code) = asked {
            object::release(kernel)?;
            return Err(code);
        }
        Ok(kernel)
    }

    fn clRetainKernel(kernel: Handle<Kernel>) {
        object::retain(kernel)
    }

    fn clReleaseKernel(kernel: Handle<Kernel>) {
        object::release(kernel)
    }
}

fn mem(value: *const c_void) -> Outcome<Option<MemId>> {
    match array(value.cast::<Handle<Mem>>(), 1).first() {
        Some(handle) if !handle.is_null() => Ok(Some(get(*handle)?.it.id)),
        _ => Ok(None),
    }
}

fn sampler(value: *const c_void) -> Outcome<SamplerId> {
    let handle = array(value.cast::<Handle<Sampler>>(), 1);
    Ok(get(*handle.first().ok_or(codes::INVALID_SAMPLER)?)?.it.id)
}

/// The kind of an argument, given that the host's driver has accepted this value: an object, or 8
/// bytes that are not one. Neither null nor zeroes tell the kind, since buffers may be null, too.
fn learned(value: &Value) -> Option<ArgumentKind> {
    match value {
        Value::Mem(Some(_)) => Some(ArgumentKind::Mem()),
        Value::Sampler(_) => Some(ArgumentKind::Sampler()),
        Value::Bytes(Blob(bytes)) => (bytes.len() == size_of::<usize>()
            && bytes.iter().any(|byte| *byte != 0))
        .then_some(ArgumentKind::Bytes()),
        _ => None,
    }
}

/// Converts the value of an argument, according to its kind.
fn argument(kind: &ArgumentKind, size: usize, value: *const c_void) -> Outcome<Value> {
    let plain = || Value::Bytes(Blob(array(value.cast(), size)));
    let is_handle = size == size_of::<usize>();
    Ok(match kind {
        ArgumentKind::Local() if size == 0 => return Err(codes::INVALID_ARG_SIZE),
        ArgumentKind::Local() if !value.is_null() => return Err(codes::INVALID_ARG_VALUE),
        ArgumentKind::Local() => Value::Local(size as u64),
        ArgumentKind::Mem() | ArgumentKind::Sampler() if !is_handle => {
            return Err(codes::INVALID_ARG_SIZE);
        }
        ArgumentKind::Mem() => Value::Mem(mem(value)?),
        ArgumentKind::Sampler() => Value::Sampler(sampler(value)?),
        ArgumentKind::Bytes() if value.is_null() => return Err(codes::INVALID_ARG_VALUE),
        ArgumentKind::Bytes() => plain(),
        ArgumentKind::Unknown() if size == 0 => return Err(codes::INVALID_ARG_SIZE),
        ArgumentKind::Unknown() if value.is_null() => Value::Local(size as u64),
        // The driver does not report the kind, and has not accepted a value yet. A value that
        // equals the handle of one of our live objects is that object.
        ArgumentKind::Unknown() if is_handle => {
            let handle = array(value.cast::<usize>(), 1)[0];
            match object::find(handle) {
                Some(object::MEM) => Value::Mem(mem(value)?),
                Some(_) => Value::Sampler(sampler(value)?),
                None => plain(),
            }
        }
        ArgumentKind::Unknown() => plain(),
    })
}

entry_points! {
    fn clSetKernelArg(kernel: Handle<Kernel>, index: u32, size: usize, value: *const c_void) {
        let kernel = get(kernel)?;
        let place = kernel
            .it
            .kinds
            .get(index as usize)
            .ok_or(codes::INVALID_ARG_INDEX)?;
        let kind = place.get().unwrap_or(&ArgumentKind::Unknown());
        let mut set = kernel.it.set.lock_unpoisoned();
        // There are as many as there are kinds.
        let known = set
            .get_mut(index as usize)
            .ok_or(codes::INVALID_ARG_INDEX)?;
        // A value that may be a handle is examined each time: objects come and go.
        let plain = matches!(kind, ArgumentKind::Bytes()) || size != size_of::<usize>();
        if let Set::Bytes(old) = known
            && plain
        {
            if same(value.cast(), size, &old.0) {
                return Ok(());
            }
            if size == old.0.len() && !value.is_null() {
                return give_bytes(kernel.it.id, index, old, value);
            }
        }
        let value = argument(kind, size, value)?;
        let new = Set::of(&value);
        if matches!(new, Set::Bytes(_)) && new == *known {
            return Ok(());
        }
        let learned = match kind {
            ArgumentKind::Unknown() => learned(&value),
            _ => None,
        };
        let call = SetArgument {
            kernel: kernel.it.id,
            index,
            value,
        };
        let Some(kind) = learned else {
            return give_argument(known, new, &call);
        };
        // Waited for even if such a value was accepted before: that value may have been zeroes.
        link::connected()?.ask(&call)?;
        *known = new;
        // Another thread that was faster has learned the same.
        let _ = place.set(kind);
        Ok(())
    }
}

/// Replaces the bytes of an argument, which the driver has accepted, by the same number of other
/// bytes. Allocates nothing, since applications do this between two kernels.
fn give_bytes(kernel: KernelId, index: u32, old: &mut Blob, value: *const c_void) -> Outcome {
    let mut bytes = std::mem::take(&mut old.0);
    copy(value.cast(), &mut bytes);
    let call = SetArgument {
        kernel,
        index,
        value: Value::Bytes(Blob(bytes)),
    };
    // It has no effect before the kernel is enqueued.
    let sent = link::connected().and_then(|link| link.post_with_next(&call));
    if let Value::Bytes(bytes) = call.value {
        *old = bytes;
    }
    sent
}

/// Sets an argument to a new value. Does not wait if the driver has accepted a similar value
/// (`known`) before.
pub fn give_argument(known: &mut Set, new: Set, call: &SetArgument) -> Outcome {
    let link = link::connected()?;
    if known.vouches_for(&new) {
        // It has no effect before the kernel is enqueued.
        link.post_with_next(call)?;
    } else {
        link.ask(call)?;
    }
    *known = new;
    Ok(())
}

impl Kernel {
    /// Whether all arguments have been set.
    pub fn is_ready(&self) -> bool {
        let set = self.set.lock_unpoisoned();
        set.iter().all(|set| *set != Set::Never)
    }
}

entry_points! {
    fn clGetKernelInfo(
        kernel: Handle<Kernel>, name: u32, size: usize, value: *mut c_void, size_ret: *mut usize
    ) {
        let kernel = get(kernel)?;
        let program = &kernel.it.program;
        let answer = match name {
            codes::KERNEL_REFERENCE_COUNT => bytes(&[kernel.count()]),
            codes::KERNEL_NUM_ARGS => bytes(&[kernel.it.kinds.len() as u32]),
            codes::KERNEL_CONTEXT => bytes(&[program.it.context.pointer()]),
            codes::KERNEL_PROGRAM => bytes(&[program.pointer()]),
            _ => ask(Target::Kernel(kernel.it.id), name)?,
        };
        give(&answer, size, value, size_ret)
    }
}

fn optional(device: Handle<Device>) -> Outcome<Option<DeviceId>> {
    if device.is_null() {
        return Ok(None);
    }
    Ok(Some(get(device)?.it.id))
}

entry_points! {
    fn clGetKernelWorkGroupInfo(
        kernel: Handle<Kernel>, device: Handle<Device>, name: u32, size: usize, value: *mut c_void,
        size_ret: *mut usize
    ) {
        let kernel = get(kernel)?;
        let target = Target::WorkGroup(kernel.it.id, optional(device)?);
        give(&ask(target, name)?, size, value, size_ret)
    }

    fn clGetKernelArgInfo(
        kernel: Handle<Kernel>, index: u32, name: u32, size: usize, value: *mut c_void, size_ret: *mut usize
    ) {
        let kernel = get(kernel)?;
        let target = Target::Argument(kernel.it.id, index);
        give(&ask(target, name)?, size, value, size_ret)
    }

    fn clGetKernelSubGroupInfo(
        kernel: Handle<Kernel>, device: Handle<Device>, name: u32, input_size: usize, input: *const c_void,
        size: usize, value: *mut c_void, size_ret: *mut usize
    ) {
        let kernel = get(kernel)?;
        let input = Blob(array(input.cast(), input_size));
        let target = Target::SubGroup(kernel.it.id, optional(device)?, input);
        give(&ask(target, name)?, size, value, size_ret)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        ptr::{null, null_mut},
        sync::atomic::{AtomicUsize, Ordering},
        thread,
        time::Duration,
    };

    use base::confine::{ONE_THREAD, confine};

    use super::*;
    use crate::{
        memory,
        testing::{self, LOOKED_UP},
    };

    fn some_program(context: Handle<Context>) -> Handle<Program> {
        let (text, mut code) = (c"kernel void k(global int *a, ulong b) {}".as_ptr(), 0);
        let program =
            clCreateProgramWithSource(context, 1, &raw const text, null_mut(), &raw mut code);
        assert_eq!(code, 0);
        program
    }

    fn some_kernel(context: Handle<Context>) -> Handle<Kernel> {
        let (program, mut code) = (some_program(context), 0);
        let kernel = clCreateKernel(program, c"k".as_ptr(), &raw mut code);
        assert_eq!((code, clReleaseProgram(program)), (0, 0));
        kernel
    }

    /// Sets an argument to a word. Returns what the driver was told, and how often an object was
    /// looked up.
    fn set(kernel: Handle<Kernel>, index: u32, word: u64) -> (Option<u64>, usize) {
        let before = LOOKED_UP.get();
        let code = clSetKernelArg(kernel, index, 8, (&raw const word).cast());
        assert_eq!(code, 0);
        // Flushes calls that are sent only with the next one.
        assert_eq!(clReleaseKernel(clCloneKernel(kernel, null_mut())), 0);
        let told = testing::take_set().map(|(size, word)| {
            assert_eq!(size, 8);
            word
        });
        (told, LOOKED_UP.get() - before)
    }

    fn buffer(context: Handle<Context>) -> Handle<Mem> {
        let mut code = 0;
        let buffer = memory::clCreateBuffer(context, 0, 64, null_mut(), &raw mut code);
        assert_eq!(code, 0);
        buffer
    }

    #[test]
    fn an_argument_that_the_driver_says_nothing_of_is_looked_up_once() {
        let _alone = testing::alone();
        let context = testing::context();
        let kernel = some_kernel(context);
        let buffers = [buffer(context), buffer(context)];
        for round in 0..10 {
            for buffer in buffers {
                let (told, looked) = set(kernel, 0, buffer as u64);
                // The driver is told its own handle.
                assert!(told.is_some_and(|told| told != buffer as u64 && told != 0));
                let first = round == 0 && buffer == buffers[0];
                assert_eq!(looked, usize::from(first), "of an object");
            }
            let (told, looked) = set(kernel, 1, 1000 + round);
            assert_eq!(told, Some(1000 + round));
            assert_eq!(looked, usize::from(round == 0), "of a number");
        }
        // A clone inherits what its kernel has learned.
        let clone = clCloneKernel(kernel, null_mut());
        assert_eq!(set(clone, 1, 7), (Some(7), 0));
    }

    #[test]
    fn zeroes_do_not_make_a_number_of_an_argument() {
        let _alone = testing::alone();
        let context = testing::context();
        let kernel = some_kernel(context);
        assert_eq!(set(kernel, 0, 0), (Some(0), 1));
        let buffer = buffer(context);
        let (told, looked) = set(kernel, 0, buffer as u64);
        assert!(told.is_some_and(|told| told != buffer as u64 && told != 0));
        assert_eq!(looked, 1);
        // And a null buffer is null.
        assert_eq!(set(kernel, 0, 0), (Some(0), 0));
    }

    /// Builds that have ended.
    static ENDED: AtomicUsize = AtomicUsize::new(0);

    extern "C" fn ended(_: Handle<Program>, _: *mut c_void) {
        ENDED.fetch_add(1, Ordering::SeqCst);
    }

    #[test]
    fn a_build_without_a_thread_for_its_callback_is_refused() {
        let _alone = testing::alone();
        let program = some_program(testing::context());
        let place = program as usize;
        let build = move || {
            let program = place as Handle<Program>;
            clBuildProgram(program, 0, null(), null(), Some(ended), null_mut())
        };
        let confined = thread::spawn(move || {
            confine(&[ONE_THREAD]).expect("the kernel has seccomp and Landlock");
            build()
        });
        let refused = confined.join().expect("it has not panicked");
        assert_eq!(refused, codes::OUT_OF_HOST_MEMORY);
        assert_eq!(build(), 0);
        while ENDED.load(Ordering::SeqCst) == 0 {
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(ENDED.load(Ordering::SeqCst), 1);
        assert_eq!(clReleaseProgram(program), 0);
    }
}
