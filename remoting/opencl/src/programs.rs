//! Programs: creating, building and linking them. Long operations run in threads of their own.

use std::{
    io,
    ptr::{null, null_mut},
    sync::{Arc, atomic::Ordering},
    thread,
};

use remoting_proto::{
    apis::opencl::{
        calls::{
            self, BuildProgram, CompileProgram, CreateProgram, LinkProgram, ProgramId,
            ProgramOrigin, Specialize,
        },
        codes,
    },
    wire::{Blob, Header},
};
use remoting_session::notice::Notice;
use remoting_transport::endpoint::Gone;

use super::{
    Server,
    callbacks::DriverNotice,
    driver::{
        api::{Api, Handle},
        c_string, cl, outcome,
    },
    headers::Headers,
    objects::{Home, Program, keep, made},
    platform::Platform,
    provenance::ContextRecord,
    records::{Build, Builds, Linked, Origin, ProgramRecord, Rebuilt},
    variables::{self, Made},
};

/// Maximum number of builds in progress: no call is taken until one of them has ended.
pub(crate) const MOST_BUILDS: usize = 64;

/// The option for the kinds of kernels' arguments, which came with OpenCL 1.2.
const ARGUMENT_INFO: &[u8] = b"-cl-kernel-arg-info ";

/// A list for the driver: null if it is empty.
fn list(handles: &[Handle]) -> *const Handle {
    if handles.is_empty() {
        null()
    } else {
        handles.as_ptr()
    }
}

/// The result of linking, before it is the client's.
#[derive(Debug)]
pub struct LinkedProgram {
    /// The driver's handle; 0 if there is none.
    raw: Handle,
    /// Its context.
    home: Home,
    /// How its context was made.
    context: Arc<ContextRecord>,
    /// How the program itself was made.
    origin: Linked,
    /// Whether it has variables that kernels may change.
    has_variables: bool,
}

impl Server {
    pub(crate) fn create_program(&mut self, call: CreateProgram) -> Result<Vec<i32>, i32> {
        self.backend.programs.check(call.id.0)?;
        let id = call.id;
        let mut statuses = Vec::new();
        let program = self.make_program(call, &mut statuses);
        keep!(self.backend.programs, id, program).map(|()| statuses)
    }

    fn make_program(&self, call: CreateProgram, statuses: &mut Vec<i32>) -> Result<Program, i32> {
        let context = self.backend.contexts.get(call.context.0)?;
        let (home, record) = (context.home(), Arc::clone(&context.record));
        let mut for_devices = Vec::new();
        let (version, context) = (self.platform_version(home.platform), home.raw);
        let mut code = 0;
        let raw = match &call.origin {
            ProgramOrigin::Source(text) => {
                // With a length of zero, drivers look for a terminating zero.
                let (pointer, length) = match text.0.len() {
                    0 => (c"".as_ptr(), 0),
                    length => (text.0.as_ptr().cast(), length),
                };
                cl!(
                    self.backend.api,
                    clCreateProgramWithSource(
                        context,
                        1,
                        &raw const pointer,
                        &raw const length,
                        &raw mut code,
                    )
                )
            }
            ProgramOrigin::Binary(binaries) => {
                let ids: Vec<_> = binaries.iter().map(|(id, _)| *id).collect();
                let devices = self.raw_devices(&ids)?;
                for_devices = self.device_records(&ids)?;
                let lengths: Vec<_> = binaries.iter().map(|(_, blob)| blob.0.len()).collect();
                let pointers: Vec<_> = binaries.iter().map(|(_, blob)| blob.0.as_ptr()).collect();
                *statuses = vec![0; devices.len()];
                cl!(
                    self.backend.api,
                    clCreateProgramWithBinary(
                        context,
                        devices.len() as u32,
                        devices.as_ptr(),
                        lengths.as_ptr(),
                        pointers.as_ptr(),
                        statuses.as_mut_ptr(),
                        &raw mut code,
                    )
                )
            }
            ProgramOrigin::Il(_) if version < 21 => return Err(codes::INVALID_OPERATION),
            ProgramOrigin::Il(il) => cl!(
                self.backend.api,
                clCreateProgramWithIL(context, il.0.as_ptr().cast(), il.0.len(), &raw mut code)
            ),
            ProgramOrigin::BuiltIn(ids, names) => {
                let devices = self.raw_devices(ids)?;
                for_devices = self.device_records(ids)?;
                let names = c_string(names);
                cl!(
                    self.backend.api,
                    clCreateProgramWithBuiltInKernels(
                        context,
                        devices.len() as u32,
                        devices.as_ptr(),
                        names.as_ptr(),
                        &raw mut code,
                    )
                )
            }
        };
        Ok(Program {
            raw: made(raw, code)?,
            home,
            record: ProgramRecord::new(record, Origin::Created(call, for_devices)),
            builds: Builds::default(),
            untold: Builds::default(),
        })
    }

    pub(crate) fn release_program(&mut self, id: ProgramId) -> Result<(), i32> {
        match self.backend.programs.take(id.0) {
            Some(program) => outcome(cl!(self.backend.api, clReleaseProgram(program.raw))),
            None => Ok(()),
        }
    }

    /// The headers of a build, which have not been written yet.
    fn headers(&self, folders: u32, included: &[calls::HeaderFile]) -> Option<Headers> {
        let root = self.backend.files.as_ref().filter(|_| folders > 0)?;
        Some(Headers {
            root: root.clone(),
            folders,
            files: included.to_vec(),
        })
    }

    /// Runs a long operation in a thread of its own, which leaves a notice on the board.
    fn apart(
        &mut self,
        header: Header,
        (raw, under_way): (Handle, Builds),
        rebuilt: Rebuilt,
        work: impl FnOnce(&Api) -> i32 + Send + 'static,
    ) -> Result<(), Gone> {
        cl!(self.backend.api, clRetainProgram(raw));
        let (api, board) = (Arc::clone(&self.backend.api), Arc::clone(&self.board));
        let work = move || {
            let code = work(&api);
            cl!(api, clReleaseProgram(raw));
            drop(under_way);
            board.leave(Notice::Backend(DriverNotice::Built(header, rebuilt, code)));
        };
        if self.build(work).is_err() {
            cl!(self.backend.api, clReleaseProgram(raw));
            return self.answer(header, &Err::<(), i32>(codes::OUT_OF_HOST_MEMORY));
        }
        self.backend.building += 1;
        Ok(())
    }

    /// Runs a build, in a thread of its own if threads are available.
    fn build(&self, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        if !self.has_threads() {
            work();
            return Ok(());
        }
        let thread = thread::Builder::new().name("build".to_owned());
        thread.spawn(work).map(drop)
    }

    /// The options of a build from sources that makes the driver tell the kinds of kernels' arguments, so that none is
    /// given an object of another kind. Applications are told the options that they have chosen.
    fn with_argument_info(&self, options: &Blob, record: &ProgramRecord, home: Home) -> Blob {
        let has_sources = matches!(
            &*record.origin,
            Origin::Created(call, _) if matches!(call.origin, ProgramOrigin::Source(_))
        );
        let platform = self.backend.platforms.get(home.platform);
        let can_tell = |platform: &Platform| platform.version >= 12 && !platform.tells_arguments;
        // Another option is another program for a driver's cache.
        match has_sources && platform.is_some_and(can_tell) {
            true => Blob([ARGUMENT_INFO, &options.0].concat()),
            false => options.clone(),
        }
    }

    /// Answers a build that has completed. A program whose build was refused, rather than failed, is still what it was
    /// before, and is that on another device, too.
    pub(crate) fn built(
        &mut self,
        header: Header,
        rebuilt: &Rebuilt,
        code: i32,
    ) -> Result<(), Gone> {
        self.backend.building -= 1;
        let has_changed = matches!(
            code,
            0 | codes::BUILD_PROGRAM_FAILURE | codes::COMPILE_PROGRAM_FAILURE
        );
        if has_changed && let Ok(program) = self.backend.programs.get_mut(rebuilt.program.0) {
            rebuilt.apply_to(&mut program.record);
        }
        self.tell_kernels(rebuilt, code);
        self.answer(header, &outcome(code))
    }

    /// Records the outcome of a build for the kernels that were made before it was told.
    fn tell_kernels(&mut self, rebuilt: &Rebuilt, code: i32) {
        // The program's own, and this build's.
        let is_last = rebuilt.untold.count() <= 2;
        let program = self.backend.programs.get(rebuilt.program.0);
        let record = program.map(|program| &program.record);
        let record = record.ok().filter(|record| rebuilt.is_of(record));
        let record = Arc::clone(record.unwrap_or(&rebuilt.record));
        for kernel in self.backend.kernels.iter_mut() {
            if !kernel.is_untold || !rebuilt.is_of(&kernel.program) {
                continue;
            }
            if code == 0 {
                kernel.program = Arc::clone(&record);
            }
            kernel.is_untold = !is_last;
        }
    }

    pub(crate) fn build_program(
        &mut self,
        header: Header,
        call: &BuildProgram,
    ) -> Result<(), Gone> {
        let found = self.raw_devices(&call.devices).and_then(|devices| {
            let built = (
                Build::Whole(call.clone()),
                self.device_records(&call.devices)?,
            );
            let program = self.backend.programs.get(call.id.0)?;
            let untold = program.untold.clone();
            let rebuilt = Rebuilt::new(call.id, &program.record, untold, built);
            let (handle, home) = ((program.raw, program.builds.clone()), program.home);
            Ok((handle, devices, rebuilt, home))
        });
        let (program, devices, rebuilt, home) = match found {
            Ok(found) => found,
            Err(code) => return self.answer(header, &Err::<(), i32>(code)),
        };
        let headers = self.headers(call.folders, &call.included);
        let record = Arc::clone(&rebuilt.record);
        let options = self.with_argument_info(&call.options, &record, home);
        let raw = program.0;
        self.apart(header, program, rebuilt, move |api| {
            let Ok((options, _headers)) = Headers::write(headers, options) else {
                return codes::OUT_OF_HOST_MEMORY;
            };
            let pointer = list(&devices);
            let code = cl!(
                api,
                clBuildProgram(
                    raw,
                    devices.len() as u32,
                    pointer,
                    options.as_ptr(),
                    None,
                    null_mut(),
                )
            );
            // What a refused build leaves as it was keeps its variables.
            if code == 0 {
                let marks = Arc::clone(&record.has_variables);
                let has_variables = variables::has(api, raw, &Made::Built(record));
                marks.store(has_variables, Ordering::Release);
            }
            code
        })
    }

    pub(crate) fn compile_program(
        &mut self,
        header: Header,
        call: &CompileProgram,
    ) -> Result<(), Gone> {
        let found = self.raw_devices(&call.devices).and_then(|devices| {
            let mut headers = Vec::with_capacity(call.headers.len());
            let mut origins = Vec::with_capacity(call.headers.len());
            for (id, _) in &call.headers {
                let header = self.backend.programs.get(id.0)?;
                headers.push(header.raw);
                origins.push(Arc::clone(&header.record.origin));
            }
            let built = (
                Build::compiled(call.clone(), origins),
                self.device_records(&call.devices)?,
            );
            let program = self.backend.programs.get(call.id.0)?;
            let untold = program.untold.clone();
            let rebuilt = Rebuilt::new(call.id, &program.record, untold, built);
            let options = (rebuilt, program.home);
            let program = (program.raw, program.builds.clone());
            Ok((program, devices, headers, options))
        });
        let (program, devices, headers, (rebuilt, home)) = match found {
            Ok(found) => found,
            Err(code) => return self.answer(header, &Err::<(), i32>(code)),
        };
        for &header in &headers {
            cl!(self.backend.api, clRetainProgram(header));
        }
        let files = self.headers(call.folders, &call.included);
        let options = self.with_argument_info(&call.options, &rebuilt.record, home);
        let names: Vec<_> = call
            .headers
            .iter()
            .map(|(_, name)| c_string(name))
            .collect();
        let raw = program.0;
        self.apart(header, program, rebuilt, move |api| {
            let mut pointers: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
            let count = headers.len() as u32;
            let release = || {
                for &header in &headers {
                    cl!(api, clReleaseProgram(header));
                }
            };
            let Ok((options, _files)) = Headers::write(files, options) else {
                release();
                return codes::OUT_OF_HOST_MEMORY;
            };
            let code = cl!(
                api,
                clCompileProgram(
                    raw,
                    devices.len() as u32,
                    list(&devices),
                    options.as_ptr(),
                    count,
                    list(&headers),
                    if headers.is_empty() {
                        null()
                    } else {
                        pointers.as_mut_ptr().cast_const()
                    },
                    None,
                    null_mut(),
                )
            );
            release();
            code
        })
    }

    pub(crate) fn link_program(&mut self, header: Header, call: LinkProgram) -> Result<(), Gone> {
        let found = self.backend.programs.check(call.id.0).and_then(|()| {
            let context = self.backend.contexts.get(call.context.0)?;
            let made_in = (context.home(), Arc::clone(&context.record));
            let devices = self.raw_devices(&call.devices)?;
            let for_devices = self.device_records(&call.devices)?;
            let mut inputs = Vec::with_capacity(call.inputs.len());
            let mut records = Vec::with_capacity(call.inputs.len());
            let mut are_told = true;
            for id in &call.inputs {
                let input = self.backend.programs.get(id.0)?;
                inputs.push(input.raw);
                records.push(Arc::clone(&input.record));
                are_told &= !input.untold.any();
            }
            // Nobody knows which of the two builds the driver takes.
            let records = are_told.then_some(records);
            Ok((made_in, devices, for_devices, inputs, records))
        });
        let ((home, record), devices, for_devices, inputs, records) = match found {
            Ok(found) => found,
            Err(code) => return self.answer(header, &Err::<(i32, bool), i32>(code)),
        };
        let context = home.raw;
        cl!(self.backend.api, clRetainContext(context));
        for &input in &inputs {
            cl!(self.backend.api, clRetainProgram(input));
        }
        let (api, board) = (Arc::clone(&self.backend.api), Arc::clone(&self.board));
        let options = c_string(&call.options);
        let work = move || {
            let mut code = 0;
            let raw = cl!(
                api,
                clLinkProgram(
                    context,
                    devices.len() as u32,
                    list(&devices),
                    options.as_ptr(),
                    inputs.len() as u32,
                    inputs.as_ptr(),
                    None,
                    null_mut(),
                    &raw mut code,
                )
            );
            for input in inputs {
                cl!(api, clReleaseProgram(input));
            }
            cl!(api, clReleaseContext(context));
            let origin = Linked::new(call, for_devices, records);
            let made = Made::Linked(origin.inputs.clone());
            let linked = LinkedProgram {
                has_variables: raw != 0 && variables::has(&api, raw, &made),
                raw,
                home,
                context: record,
                origin,
            };
            board.leave(Notice::Backend(DriverNotice::Linked(header, linked, code)));
        };
        if self.build(work).is_err() {
            // The references end with the process, which has not even room for a thread.
            return self.answer(header, &Err::<(i32, bool), i32>(codes::OUT_OF_HOST_MEMORY));
        }
        self.backend.building += 1;
        Ok(())
    }

    /// Stores the result of linking.
    pub(crate) fn linked(
        &mut self,
        header: Header,
        linked: LinkedProgram,
        code: i32,
    ) -> Result<(), Gone> {
        self.backend.building -= 1;
        let LinkedProgram {
            raw,
            home,
            context,
            origin,
            has_variables,
        } = linked;
        let id = origin.call.id;
        let outcome = if raw == 0 {
            Ok((code, false))
        } else if let Err(code) = self.backend.programs.check(id.0) {
            // The number has been given to another program meanwhile.
            cl!(self.backend.api, clReleaseProgram(raw));
            Err(code)
        } else {
            let record = ProgramRecord::new(context, Origin::Linked(origin));
            record.has_variables.store(has_variables, Ordering::Release);
            let program = Program {
                raw,
                home,
                record,
                builds: Builds::default(),
                untold: Builds::default(),
            };
            self.backend.programs.put(id.0, Ok(program));
            Ok((code, true))
        };
        self.answer(header, &outcome)
    }

    pub(crate) fn specialize(&mut self, call: &Specialize) -> Result<(), i32> {
        let program = self.backend.programs.get(call.id.0)?;
        if self.platform_version(program.home.platform) < 22 {
            return Err(codes::INVALID_OPERATION);
        }
        let value = match call.value.0.as_slice() {
            [] => null(),
            value => value.as_ptr().cast(),
        };
        outcome(cl!(
            self.backend.api,
            clSetProgramSpecializationConstant(
                program.raw,
                call.constant,
                call.value.0.len(),
                value,
            )
        ))?;
        let program = self.backend.programs.get_mut(call.id.0)?;
        Arc::make_mut(&mut program.record).specialize(call.constant, &call.value);
        Ok(())
    }
}
