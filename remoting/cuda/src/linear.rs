//! cuBLAS calls: handles with their streams and pointer modes, and functions whose parameters are
//! marshalled by the API's definition.

use std::sync::{Arc, LazyLock};

use remoting_proto::{
    apis::cuda::{
        Kind,
        calls::{self, PostLibrary},
        codes,
        libraries::{INVALID_VALUE, Library, Matmul, STATUS},
        plan::{Argument, Parameter, Plan},
    },
    wire::{Blob, Flags, Header, Wire},
};
use remoting_session::quota::Charge;
use remoting_transport::endpoint::Gone;

use super::{Server, backend::Submitted};

/// Maximum number of handles at a time: each takes host memory.
const MOST: usize = 1024;
/// Device memory that a cuBLAS handle holds: its own workspace, as large as on the newest devices.
const WORKSPACE: u64 = 32 << 20;
/// `CUBLAS_STATUS_NOT_INITIALIZED`: not a valid handle.
pub(super) const NO_HANDLE: i32 = STATUS + 1;

/// The state of a cuBLAS handle.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct State {
    /// Whether scalars are device addresses.
    scalars_on_device: bool,
    /// The stream's number.
    stream: u32,
}

/// Functions that need special treatment, by library and number.
struct Known {
    create: u16,
    destroy: u16,
    set_stream: u16,
    set_pointer_mode: u16,
    create_light: u16,
    destroy_light: u16,
    version: u16,
    matmul: u16,
    heuristic: u16,
}

static KNOWN: LazyLock<Known> = LazyLock::new(|| {
    // A function that is not supported gets a number that no call has.
    let blas = |symbol| Library::Blas.number(symbol).unwrap_or(u16::MAX);
    let light = |symbol| Library::BlasLt.number(symbol).unwrap_or(u16::MAX);
    Known {
        create: blas("cublasCreate_v2"),
        destroy: blas("cublasDestroy_v2"),
        set_stream: blas("cublasSetStream_v2"),
        set_pointer_mode: blas("cublasSetPointerMode_v2"),
        create_light: light("cublasLtCreate"),
        destroy_light: light("cublasLtDestroy"),
        version: light("cublasLtGetVersion"),
        matmul: light("cublasLtMatmul"),
        heuristic: light("cublasLtMatmulAlgoGetHeuristic"),
    }
});

/// Converts the result of a call that nobody waits for to a `CUresult` of the same meaning.
fn as_result(code: i32) -> i32 {
    match code - STATUS {
        3 => codes::OUT_OF_MEMORY,
        7 => codes::INVALID_VALUE,
        1 => codes::INVALID_HANDLE,
        15 => codes::NOT_SUPPORTED,
        // CUDA_ERROR_LAUNCH_FAILED
        13 => 719,
        status if status > 0 => codes::UNKNOWN,
        _ => code,
    }
}

/// The results that a call has written, and the stream to which it has submitted work.
pub(super) type Done = (Vec<u8>, Option<Submitted>);

impl Server {
    /// Executes a call that is answered with its results.
    pub(super) fn library(&mut self, header: Header, call: &calls::Library) -> Result<(), Gone> {
        let outcome =
            self.call_library(call.context, call.library, call.function, &call.arguments.0);
        match outcome {
            Ok((written, submitted)) => {
                self.answer(header, &Ok(Blob(written)))?;
                let header = Header {
                    flags: Flags::default(),
                    ..header
                };
                match submitted {
                    Some(submitted) => self.conclude(header, call.context, None, Ok(submitted)),
                    None => Ok(()),
                }
            }
            Err(code) => self.answer(header, &Err::<Blob, i32>(code)),
        }
    }

    /// Executes a call without results. A client that asks learns the result of the call itself.
    pub(super) fn post_library(&mut self, header: Header, call: &PostLibrary) -> Result<(), Gone> {
        let outcome =
            self.call_library(call.context, call.library, call.function, &call.arguments.0);
        let waits = header.flags.has(Flags::ANSWER);
        let submitted = match outcome {
            Ok((_, submitted)) => {
                if waits {
                    self.answer(header, &Ok(()))?;
                }
                submitted
            }
            Err(code) if waits => return self.answer(header, &Err::<(), i32>(code)),
            Err(code) => return self.fail(header, call.context, as_result(code)),
        };
        let Some(submitted) = submitted else {
            return Ok(());
        };
        let header = Header {
            flags: Flags::default(),
            ..header
        };
        self.conclude(header, call.context, None, Ok(submitted))
    }

    fn call_library(
        &mut self,
        context: u32,
        library: u8,
        function: u16,
        bytes: &[u8],
    ) -> Result<Done, i32> {
        let library = Library::numbered(library).ok_or(codes::NOT_SUPPORTED)?;
        if library == Library::BlasLt {
            let known = &*KNOWN;
            if function == known.matmul {
                return Ok((Vec::new(), Some(self.matmul(bytes)?)));
            } else if function == known.heuristic {
                return Ok((self.heuristic(bytes)?, None));
            } else if function == known.version {
                return Ok((self.light_version()?, None));
            }
        }
        let plan = Plan::of_library(library, function).ok_or(codes::NOT_SUPPORTED)?;
        let mut arguments = plan.decode(bytes).map_err(|_| INVALID_VALUE)?;
        let creates = match library {
            Library::Blas => function == KNOWN.create,
            Library::BlasLt => function == KNOWN.create_light,
        };
        let handle = match arguments.first() {
            Some(Argument::Object(_, id)) => Some(*id),
            _ => None,
        };
        let mut context = context;
        if let Some(id) = handle {
            // The driver's context is the handle's, whichever context is current in the thread.
            let kind = match library {
                Library::Blas => Kind::Blas,
                Library::BlasLt => Kind::BlasLt,
            };
            context = self.library_handle(kind, id)?.1;
        }
        if self.enter(context)? == 0 {
            return Err(codes::INVALID_CONTEXT);
        }
        if creates {
            return self.create_handle(library, function, plan, &mut arguments, context);
        }
        let id = handle.ok_or(NO_HANDLE)?;
        let ends_light = library == Library::BlasLt && function == KNOWN.destroy_light;
        if ends_light && self.backend.objects.get(Kind::Blas, id).is_ok() {
            // A cuBLAS handle is valid here, too, but only its own library may destroy it.
            return Err(NO_HANDLE);
        }
        if let Some(Argument::Object(Kind::Stream, stream)) = arguments.get(1)
            && library == Library::Blas
            && function == KNOWN.set_stream
            && let Ok(stream) = self.backend.objects.get(Kind::Stream, *stream)
            && stream.context != context
        {
            // Otherwise the stream would stay with the handle after the stream's own context is
            // destroyed.
            return Err(INVALID_VALUE);
        }
        let state = self.backend.linear.get(&id).copied().unwrap_or_default();
        check_scalars(plan, &arguments, state.scalars_on_device)?;
        let words = self.words(plan, &mut arguments)?;
        // SAFETY: numbers may have any value; handles are the library's own and of this session.
        // Scalars are either in memory as large as the largest scalar or, in the mode that the
        // library has set as well, on the device, where addresses are dereferenced. Arrays have the
        // size that the definition gives.
        unsafe { self.backend.api.libraries.call(library, function, &words) }?;
        let answer = self.results(plan, &mut arguments, context)?;
        if ends_light {
            self.backend.objects.remove(id);
        } else if library == Library::Blas {
            self.after_blas(function, id, &arguments);
        }
        let submitted = match plan.parameters.len() {
            // Functions that query or set something submit no work.
            0..=3 => None,
            _ => Some(self.submit_to(context, state.stream)?),
        };
        Ok((answer, submitted))
    }

    /// The context and stream that a call of a library submits to, if it may.
    pub(super) fn library_stream(
        &self,
        library: u8,
        function: u16,
        bytes: &[u8],
    ) -> Option<(u32, u32)> {
        match Library::numbered(library)? {
            Library::BlasLt if function == KNOWN.matmul => {
                let call = Matmul::from_bytes(bytes).ok()?;
                let (_, context) = self.library_handle(Kind::BlasLt, call.handle).ok()?;
                Some((context, call.stream))
            }
            Library::BlasLt => None,
            Library::Blas => {
                let arguments = Plan::of_library(Library::Blas, function)?
                    .decode(bytes)
                    .ok()?;
                let Some(Argument::Object(_, id)) = arguments.first() else {
                    return None;
                };
                let (_, context) = self.library_handle(Kind::Blas, *id).ok()?;
                Some((context, self.backend.linear.get(id)?.stream))
            }
        }
    }

    /// The library's handle of an object, and its context.
    pub(super) fn library_handle(&self, kind: Kind, id: u32) -> Result<(usize, u32), i32> {
        let object = self.backend.objects.get(kind, id);
        let object = object.map_err(|_| NO_HANDLE)?;
        Ok((object.raw, object.context))
    }

    fn create_handle(
        &mut self,
        library: Library,
        function: u16,
        plan: &Plan,
        arguments: &mut [Argument],
        context: u32,
    ) -> Result<Done, i32> {
        let objects = self.backend.objects.iter();
        let handles =
            objects.filter(|(_, object)| matches!(object.kind, Kind::Blas | Kind::BlasLt));
        if handles.count() >= MOST {
            return Err(codes::OUT_OF_MEMORY);
        }
        // Space for the handle, which does not exist yet.
        let [Argument::Memory { .. }] = arguments else {
            return Err(INVALID_VALUE);
        };
        let charge: Option<Arc<Charge>> = match library {
            Library::Blas => Some(self.charge(WORKSPACE)?),
            Library::BlasLt => None,
        };
        let words = self.words(plan, arguments)?;
        // SAFETY: the parameter is space for a handle.
        unsafe { self.backend.api.libraries.call(library, function, &words) }?;
        let answer = self.results(plan, arguments, context)?;
        let id = match arguments.first() {
            Some(Argument::Memory { words, .. }) => words.first().map_or(0, |word| *word as u32),
            _ => 0,
        };
        if let Ok(object) = self.backend.objects.get_mut(Kind::BlasLt, id) {
            object.charge = charge;
        }
        if library == Library::Blas {
            self.backend.linear.insert(id, State::default());
        }
        Ok((answer, None))
    }

    /// Updates the state after the success of some functions.
    fn after_blas(&mut self, function: u16, id: u32, arguments: &[Argument]) {
        if function == KNOWN.destroy {
            self.backend.objects.remove(id);
            self.backend.linear.remove(&id);
            return;
        }
        let Some(state) = self.backend.linear.get_mut(&id) else {
            return;
        };
        match arguments.get(1) {
            Some(Argument::Object(_, stream)) if function == KNOWN.set_stream => {
                state.stream = *stream;
            }
            Some(Argument::Word(mode)) if function == KNOWN.set_pointer_mode => {
                // The library reads only 32 bits.
                state.scalars_on_device = *mode as u32 == 1;
            }
            _ => {}
        }
    }

    /// Detaches a stream that is about to be destroyed from the handles that use it.
    pub(super) fn leave_stream(&mut self, stream: u32) {
        if stream == 0 {
            return;
        }
        let with = self.backend.linear.iter();
        let with: Vec<u32> = with
            .filter(|(_, state)| state.stream == stream)
            .map(|(id, _)| *id)
            .collect();
        for id in with {
            if let Some(state) = self.backend.linear.get_mut(&id) {
                state.stream = 0;
            }
            let Ok((raw, _)) = self.library_handle(Kind::Blas, id) else {
                continue;
            };
            let words = [raw as u64, 0];
            // SAFETY: a handle of the library's, and no stream.
            let left = unsafe {
                let libraries = &self.backend.api.libraries;
                libraries.call(Library::Blas, KNOWN.set_stream, &words)
            };
            // It cannot fail with a valid handle.
            debug_assert!(left.is_ok());
        }
    }
}

/// Checks that scalars are where the library expects them, since it dereferences host addresses.
fn check_scalars(plan: &Plan, arguments: &[Argument], on_device: bool) -> Result<(), i32> {
    for (parameter, argument) in plan.parameters.iter().zip(arguments) {
        if let Parameter::Scalar { .. } = parameter
            && matches!(argument, Argument::Word(_)) != on_device
        {
            return Err(INVALID_VALUE);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use remoting_proto::wire::Wire;

    use super::*;

    #[test]
    fn functions_of_which_more_is_known_are_served() {
        let known = &*KNOWN;
        for number in [
            known.create,
            known.destroy,
            known.set_stream,
            known.set_pointer_mode,
            known.create_light,
            known.destroy_light,
            known.version,
            known.matmul,
            known.heuristic,
        ] {
            assert_ne!(number, u16::MAX);
        }
    }

    #[test]
    fn an_address_is_no_scalar_of_the_host_s() {
        let number = Library::Blas.number("cublasSscal_v2").unwrap();
        let plan = Plan::of_library(Library::Blas, number).unwrap();
        let mut bytes = Vec::new();
        20u32.put(&mut bytes);
        3u64.put(&mut bytes);
        false.put(&mut bytes);
        0x7fff_0000_1000u64.put(&mut bytes);
        (0x2000u64, 1u64).put(&mut bytes);
        let arguments = plan.decode(&bytes).unwrap();
        assert_eq!(check_scalars(plan, &arguments, false), Err(INVALID_VALUE));
        assert_eq!(check_scalars(plan, &arguments, true), Ok(()));
    }

    #[test]
    fn what_nobody_waited_for_is_told_as_the_driver_would() {
        assert_eq!(as_result(INVALID_VALUE), codes::INVALID_VALUE);
        assert_eq!(as_result(STATUS + 13), 719);
        assert_eq!(as_result(codes::INVALID_CONTEXT), codes::INVALID_CONTEXT);
    }
}
