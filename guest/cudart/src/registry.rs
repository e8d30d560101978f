//! What compiled programs register before `main`: images, and the kernels and variables in them.
//!
//! Only addresses are recorded. An image is loaded when its first kernel or variable is needed, since most images of a
//! large program are never used. Names and images belong to the program and exist until it unregisters them.

use std::{
    collections::{HashMap, HashSet},
    ffi::{c_char, c_void},
    hash::{BuildHasherDefault, Hasher},
    ptr::{dangling_mut, null_mut},
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicPtr, Ordering},
    },
};

use cuda_definition::driver::types::*;

use crate::{
    context,
    driver::driver,
    error::{Answer, Error},
};

/// An image: a fat binary in the program.
pub struct Binary {
    image: usize,
    library: Mutex<Option<Result<usize, Error>>>,
    /// The addresses of its functions and variables, which are unregistered with it.
    functions: Mutex<Vec<usize>>,
    variables: Mutex<Vec<usize>>,
}

/// A kernel, identified by the address of its host function.
struct Function {
    binary: Arc<Binary>,
    /// The address of the name, which ends in a zero byte.
    name: usize,
    kernel: AtomicPtr<CUkern_st>,
}

/// A variable, identified by the address of its shadow on the host.
struct Variable {
    binary: Arc<Binary>,
    name: usize,
    size: usize,
    /// Where the program wants the address of a managed variable.
    managed: Option<usize>,
}

/// A hasher for addresses, for which one multiplication is sufficient.
#[derive(Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_usize(usize::from(*byte) ^ self.0 as usize);
        }
    }

    fn write_usize(&mut self, address: usize) {
        self.0 = (address as u64)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(26);
    }
}

type ByAddress<T> = HashMap<usize, T, BuildHasherDefault<AddressHasher>>;

#[derive(Default)]
struct Registry {
    functions: ByAddress<Arc<Function>>,
    variables: ByAddress<Arc<Variable>>,
    /// Kernels that the program got from `cudaLibraryGetKernel`.
    kernels: HashSet<usize, BuildHasherDefault<AddressHasher>>,
}

static ALL: RwLock<Option<Registry>> = RwLock::new(None);

fn read<T>(with: impl FnOnce(&Registry) -> Option<T>) -> Option<T> {
    let all = ALL.read().unwrap_or_else(PoisonError::into_inner);
    all.as_ref().and_then(with)
}

fn write<T>(with: impl FnOnce(&mut Registry) -> T) -> T {
    let mut all = ALL.write().unwrap_or_else(PoisonError::into_inner);
    with(all.get_or_insert_default())
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Binary {
    /// Registers an image.
    pub fn new(image: *const c_void) -> Arc<Self> {
        Arc::new(Self {
            image: image as usize,
            library: Mutex::default(),
            functions: Mutex::default(),
            variables: Mutex::default(),
        })
    }

    /// The image as a library of the driver, which is loaded now if it has not been. A failure is permanent.
    ///
    /// # Errors
    /// The driver cannot load it.
    fn library(&self) -> Answer<CUlibrary> {
        let mut library = locked(&self.library);
        let loaded = *library.get_or_insert_with(|| load(self.image as *const c_void));
        loaded.map(|library| library as CUlibrary)
    }

    /// Loads the image and writes the addresses of its managed variables to the program.
    ///
    /// # Errors
    /// The driver cannot load it, or a variable is not in it.
    pub fn initialise(&self) -> Answer {
        context::ready()?;
        let library = self.library()?;
        for at in locked(&self.variables).iter() {
            let variable = read(|all| all.variables.get(at).cloned());
            if let Some(variable) = variable
                && let Some(place) = variable.managed
            {
                let (mut address, mut size) = (0, 0);
                // SAFETY: a loaded library, a static name, pointers valid for writing the answers; the program has a
                // pointer at this place.
                unsafe {
                    let name = variable.name as *const c_char;
                    driver!(cuLibraryGetManaged(
                        &raw mut address,
                        &raw mut size,
                        library,
                        name
                    ))?;
                    (place as *mut u64).write(address);
                }
            }
        }
        Ok(())
    }

    /// Unregisters the image and everything in it.
    pub fn forget(&self) {
        // A function or variable that several objects contain (a template's) has a single address, which refers to the
        // image that registered it last.
        let mine = |binary: &Arc<Binary>| std::ptr::eq(&raw const **binary, self);
        write(|all| {
            for at in locked(&self.functions).drain(..) {
                if all.functions.get(&at).is_some_and(|one| mine(&one.binary)) {
                    all.functions.remove(&at);
                }
            }
            for at in locked(&self.variables).drain(..) {
                if all.variables.get(&at).is_some_and(|one| mine(&one.binary)) {
                    all.variables.remove(&at);
                }
            }
        });
        if let Some(Ok(library)) = locked(&self.library).take() {
            // The process may be about to end, with the driver gone already. So errors are ignored.
            // SAFETY: it was loaded and nothing refers to it any more.
            let _: Answer = unsafe { driver!(cuLibraryUnload(library as CUlibrary)) };
        }
    }
}

fn load(image: *const c_void) -> Result<usize, Error> {
    let mut library = null_mut();
    // The program keeps the image where it is.
    let mut options = [CUlibraryOption::CU_LIBRARY_BINARY_IS_PRESERVED];
    // The option has no value of its own: any value but null enables it.
    let mut values = [dangling_mut::<c_void>()];
    // SAFETY: an image that the compiler generated; options with a value each.
    unsafe {
        driver!(cuLibraryLoadData(
            &raw mut library,
            image,
            null_mut(),
            null_mut(),
            0,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
            1
        ))?;
    }
    Ok(library as usize)
}

/// Registers a kernel: the address of its host function, and its name, which is static.
pub fn add_function(binary: &Arc<Binary>, host: *const c_void, name: *const c_char) {
    locked(&binary.functions).push(host as usize);
    let function = Arc::new(Function {
        binary: Arc::clone(binary),
        name: name as usize,
        kernel: AtomicPtr::new(null_mut()),
    });
    write(|all| all.functions.insert(host as usize, function));
}

/// Registers a variable: its shadow on the host, its name, which is static, and its size in bytes. For a managed one,
/// `managed` is where the program wants its address.
pub fn add_variable(
    binary: &Arc<Binary>,
    host: *const c_void,
    name: *const c_char,
    size: usize,
    managed: Option<*mut c_void>,
) {
    locked(&binary.variables).push(host as usize);
    let variable = Arc::new(Variable {
        binary: Arc::clone(binary),
        name: name as usize,
        size,
        managed: managed.map(|place| place as usize),
    });
    write(|all| all.variables.insert(host as usize, variable));
}

/// Records a kernel that the program got as a handle, so that it can be launched as such.
pub fn add_kernel(kernel: CUkernel) {
    write(|all| all.kernels.insert(kernel as usize));
}

/// The kernel that a program refers to by the address of its host function, or by a handle. The thread must have a
/// context.
///
/// # Errors
/// The kernel is not registered, or its image has no such kernel for this device.
pub fn kernel(host: *const c_void) -> Answer<CUkernel> {
    let unknown = Error::cudaErrorInvalidDeviceFunction;
    let Some(function) = read(|all| all.functions.get(&(host as usize)).cloned()) else {
        let handle = read(|all| {
            all.kernels
                .contains(&(host as usize))
                .then_some(host as CUkernel)
        });
        return handle.ok_or(unknown);
    };
    let known = function.kernel.load(Ordering::Acquire);
    if !known.is_null() {
        return Ok(known);
    }
    let library = function.binary.library()?;
    let mut kernel = null_mut();
    // SAFETY: a loaded library, a static name, and valid for writing the answer.
    unsafe {
        let name = function.name as *const c_char;
        driver!(cuLibraryGetKernel(&raw mut kernel, library, name)).map_err(
            |error| match error {
                Error::cudaErrorSymbolNotFound => unknown,
                error => error,
            },
        )?;
    }
    function.kernel.store(kernel, Ordering::Release);
    Ok(kernel)
}

/// The address of a registered variable in the current context, and its size in bytes.
///
/// # Errors
/// The variable is not registered, or its image has no such variable.
pub fn variable(host: *const c_void) -> Answer<(CUdeviceptr, usize)> {
    let unknown = Error::cudaErrorInvalidSymbol;
    let variable = read(|all| all.variables.get(&(host as usize)).cloned()).ok_or(unknown)?;
    context::ready()?;
    let library = variable.binary.library()?;
    let (mut address, mut size) = (0, 0);
    let name = variable.name as *const c_char;
    // SAFETY: a loaded library, a static name, and valid for writing the answers.
    let found = unsafe {
        match variable.managed {
            Some(_) => driver!(cuLibraryGetManaged(
                &raw mut address,
                &raw mut size,
                library,
                name
            )),
            None => driver!(cuLibraryGetGlobal(
                &raw mut address,
                &raw mut size,
                library,
                name
            )),
        }
    };
    found.map_err(|error| match error {
        Error::cudaErrorSymbolNotFound => unknown,
        error => error,
    })?;
    Ok((
        address,
        if variable.size == 0 {
            size
        } else {
            variable.size
        },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_of_two_images_stays_until_the_last_one_is_forgotten() {
        let (first, second) = (Binary::new(std::ptr::null()), Binary::new(std::ptr::null()));
        let function = 0x3000 as *const c_void;
        for binary in [&first, &second] {
            add_function(binary, function, c"kernel".as_ptr());
        }
        let known = || read(|all| all.functions.get(&0x3000).map(|_| ())).is_some();
        first.forget();
        assert!(known());
        second.forget();
        assert!(!known());
    }

    #[test]
    fn what_is_forgotten_with_its_image_is_unknown_again() {
        let binary = Binary::new(std::ptr::null());
        let (function, variable) = (0x1000 as *const c_void, 0x2000 as *const c_void);
        add_function(&binary, function, c"kernel".as_ptr());
        add_variable(&binary, variable, c"variable".as_ptr(), 4, None);
        let known = || {
            let functions = read(|all| all.functions.get(&0x1000).map(|_| ()));
            let variables = read(|all| all.variables.get(&0x2000).map(|_| ()));
            (functions.is_some(), variables.is_some())
        };
        assert_eq!(known(), (true, true));
        binary.forget();
        assert_eq!(known(), (false, false));
        assert_eq!(
            super::variable(variable),
            Err(Error::cudaErrorInvalidSymbol)
        );
        assert_eq!(kernel(function), Err(Error::cudaErrorInvalidDeviceFunction));
    }
}
