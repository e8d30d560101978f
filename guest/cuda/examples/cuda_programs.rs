//! Runs programs that NVIDIA's compiler has built on the first device, and compares what they
//! compute and print with the results of this processor. With `endless`, runs one until an error
//! occurs, and reports each round that was correct. With `busy FILE`, keeps kernels running and
//! reports each one that ends, until FILE exists. With `memory`, allocates memory until there is
//! none left. With `compile`, builds the programs here with NVIDIA's compiler NVRTC
//! (`libnvrtc.so.13`, as found by the loader).

use std::{
    collections::VecDeque,
    env,
    error::Error as _,
    ffi::{CString, c_void},
    path::Path,
    ptr::null_mut,
};

use cuda_definition::driver::{signatures, types::*};
use gloop::nvrtc::{self, Compiler, Source};
use libloading::Library;

const VECTOR_ADD: &str =
    include_str!("../../../tests/cuda-driver/tests/kernels/vector_add.compute_75.ptx");
const HISTOGRAM: &str =
    include_str!("../../../tests/cuda-driver/tests/kernels/histogram.compute_75.ptx");
const MATMUL: &str = include_str!("../../../tests/cuda-driver/tests/kernels/matmul.compute_75.ptx");
/// CUDA C++ source.
const VECTOR_ADD_SOURCE: &str =
    include_str!("../../../tests/cuda-driver/tests/kernels/vector_add.cu");
const REDUCE_SOURCE: &str = include_str!("../../../tests/cuda-driver/tests/kernels/reduce.cu");
const PRINT: &str = include_str!("../../../tests/cuda-driver/tests/kernels/print.compute_75.ptx");

type Outcome<T> = Result<T, String>;

/// The driver, with a current context.
struct Device(Library);

/// Calls a function by its symbol, with the signature of the API's definition.
macro_rules! cuda {
    ($device:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: the signature is the definition's, and the pointers point to what it expects.
        #[allow(unused_unsafe)]
        let result = unsafe {
            let symbol = concat!(stringify!($name), "\0").as_bytes();
            let function = $device.0.get::<signatures::$name>(symbol);
            function.map_err(|error| error.to_string())?($($argument),*)
        };
        outcome(stringify!($name), result)
    }};
}

fn outcome(what: &str, result: CUresult) -> Outcome<()> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let found = CUresult::NAMES.iter().find(|(_, known)| *known == result);
    let name = found.map_or_else(|| result.0.to_string(), |(name, _)| (*name).to_owned());
    Err(format!("{what}: {name}"))
}

impl Device {
    fn open() -> Outcome<Self> {
        // SAFETY: loads the driver that the loader chooses, as any program does.
        let library = unsafe { Library::new("libcuda.so.1") };
        let device = Self(library.map_err(|error| error.to_string())?);
        let mut context = null_mut();
        cuda!(device, cuInit(0))?;
        cuda!(device, cuDevicePrimaryCtxRetain(&raw mut context, 0))?;
        cuda!(device, cuCtxSetCurrent(context))?;
        Ok(device)
    }

    fn function(&self, ptx: &str, name: &str) -> Outcome<CUfunction> {
        let text = |text: &str| CString::new(text).map_err(|error| error.to_string());
        let (ptx, name) = (text(ptx)?, text(name)?);
        let (mut module, mut function) = (null_mut(), null_mut());
        cuda!(self, cuModuleLoadData(&raw mut module, ptx.as_ptr().cast()))?;
        cuda!(
            self,
            cuModuleGetFunction(&raw mut function, module, name.as_ptr())
        )?;
        Ok(function)
    }

    fn upload<T>(&self, values: &[T]) -> Outcome<CUdeviceptr> {
        let (mut at, size) = (0, size_of_val(values));
        cuda!(self, cuMemAlloc_v2(&raw mut at, size))?;
        cuda!(self, cuMemcpyHtoD_v2(at, values.as_ptr().cast(), size))?;
        Ok(at)
    }

    fn download<T: Copy + Default>(&self, at: CUdeviceptr, count: usize) -> Outcome<Vec<T>> {
        let mut values = vec![T::default(); count];
        let size = size_of_val(values.as_slice());
        cuda!(self, cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), at, size))?;
        Ok(values)
    }

    fn launch(
        &self,
        function: CUfunction,
        (grid, block, shared): ([u32; 2], [u32; 2], u32),
        arguments: &mut [*mut c_void],
    ) -> Outcome<()> {
        let ([across, down], [wide, high]) = (grid, block);
        let parameters = arguments.as_mut_ptr();
        cuda!(
            self,
            cuLaunchKernel(
                function,
                across,
                down,
                1,
                wide,
                high,
                1,
                shared,
                null_mut(),
                parameters,
                null_mut()
            )
        )
    }

    fn free(&self, at: CUdeviceptr) -> Outcome<()> {
        cuda!(self, cuMemFree_v2(at))
    }
}

/// A kernel's argument.
fn argument<T>(value: &mut T) -> *mut c_void {
    (&raw mut *value).cast()
}

fn is(what: &str, right: bool) -> Outcome<()> {
    match right {
        true => Ok(()),
        false => Err(format!("{what} is WRONG")),
    }
}

/// Adds two vectors.
fn add(device: &Device, function: CUfunction, round: usize) -> Outcome<()> {
    const COUNT: usize = 4096;
    let of = |step: usize| -> Vec<f32> {
        let number = |at| ((at * step + round) % 1000) as f32;
        (0..COUNT).map(number).collect()
    };
    let (first, second) = (of(3), of(7));
    let (mut a, mut b) = (device.upload(&first)?, device.upload(&second)?);
    let (mut sum, mut count) = (device.upload(&[0f32; COUNT])?, COUNT as i32);
    let mut arguments = [
        argument(&mut a),
        argument(&mut b),
        argument(&mut sum),
        argument(&mut count),
    ];
    device.launch(function, ([32, 1], [128, 1], 0), &mut arguments)?;
    let sums: Vec<f32> = device.download(sum, COUNT)?;
    for at in [a, b, sum] {
        device.free(at)?;
    }
    let right = |at: usize| (sums[at] - first[at] - second[at]).abs() < f32::EPSILON;
    is("the sum of vectors", (0..COUNT).all(right))
}

/// Bytes, and a kernel that adds the number of occurrences of each value among them to earlier
/// counts.
struct Histogram<'a> {
    device: &'a Device,
    function: CUfunction,
    bytes: CUdeviceptr,
    count: u32,
    bins: CUdeviceptr,
    expected: [u32; 256],
}

impl<'a> Histogram<'a> {
    fn new(device: &'a Device, count: u32) -> Outcome<Self> {
        let bytes: Vec<u8> = (0..count)
            .map(|at| (at.wrapping_mul(at) / 7) as u8)
            .collect();
        let mut expected = [0u32; 256];
        for byte in &bytes {
            expected[usize::from(*byte)] += 1;
        }
        Ok(Self {
            device,
            function: device.function(HISTOGRAM, "histogram")?,
            bytes: device.upload(&bytes)?,
            count,
            bins: device.upload(&[0u32; 256])?,
            expected,
        })
    }

    fn launch(&mut self) -> Outcome<()> {
        let mut arguments = [
            argument(&mut self.bytes),
            argument(&mut self.count),
            argument(&mut self.bins),
        ];
        let shape = ([4, 1], [128, 1], 1024);
        self.device.launch(self.function, shape, &mut arguments)
    }

    /// Checks that the bytes were counted this many times.
    fn check(&self, times: u32) -> Outcome<()> {
        let counted: Vec<u32> = self.device.download(self.bins, 256)?;
        let expected = self.expected.map(|count| count.wrapping_mul(times));
        is("the histogram", counted == expected)
    }
}

/// Counts byte values.
fn count(device: &Device) -> Outcome<()> {
    let mut histogram = Histogram::new(device, 20_000)?;
    histogram.launch()?;
    histogram.check(1)
}

/// Keeps this many kernels running until the file exists.
fn busy(device: &Device, until: &Path) -> Outcome<()> {
    const UNDER_WAY: usize = 32;
    const WITHOUT_TIME: u32 = 2;
    let mut histogram = Histogram::new(device, 4_000)?;
    let mut ends = VecDeque::new();
    let mut done = 0;
    while !until.exists() {
        histogram.launch()?;
        let mut end = null_mut();
        cuda!(device, cuEventCreate(&raw mut end, WITHOUT_TIME))?;
        cuda!(device, cuEventRecord(end, null_mut()))?;
        ends.push_back(end);
        if ends.len() < UNDER_WAY {
            continue;
        }
        if let Some(end) = ends.pop_front() {
            cuda!(device, cuEventSynchronize(end))?;
            cuda!(device, cuEventDestroy_v2(end))?;
            done += 1;
            println!("kernel {done} has ended");
        }
    }
    done += ends.len() as u32;
    histogram.check(done)?;
    println!("{done} kernels were right");
    Ok(())
}

/// Multiplies two matrices of integers, so that there is no rounding.
fn multiply(device: &Device) -> Outcome<()> {
    const SIZE: usize = 40;
    let of =
        |step: usize| -> Vec<f32> { (0..SIZE * SIZE).map(|at| (at * step % 11) as f32).collect() };
    let (left, right) = (of(3), of(5));
    let function = device.function(MATMUL, "matmul")?;
    let (mut a, mut b) = (device.upload(&left)?, device.upload(&right)?);
    let (mut product, mut size) = (device.upload(&[0f32; SIZE * SIZE])?, SIZE as i32);
    let mut arguments = [
        argument(&mut a),
        argument(&mut b),
        argument(&mut product),
        argument(&mut size),
    ];
    device.launch(function, ([3, 3], [16, 16], 0), &mut arguments)?;
    let found: Vec<f32> = device.download(product, SIZE * SIZE)?;
    let expected = |at: usize| -> f32 {
        let (row, column) = (at / SIZE, at % SIZE);
        (0..SIZE)
            .map(|i| left[row * SIZE + i] * right[i * SIZE + column])
            .sum()
    };
    let same = |at: usize| (found[at] - expected(at)).abs() < 0.5;
    is("the product of matrices", (0..SIZE * SIZE).all(same))
}

/// Makes a kernel print.
fn print(device: &Device) -> Outcome<()> {
    let function = device.function(PRINT, "print")?;
    let (mut word, mut factor) = (device.upload(b"a kernel says\0")?, 0.5f64);
    let mut arguments = [argument(&mut word), argument(&mut factor)];
    device.launch(function, ([1, 1], [32, 1], 0), &mut arguments)?;
    cuda!(device, cuCtxSynchronize())
}

/// An error with its cause.
fn chain(error: &nvrtc::Error) -> String {
    let why = error.source().map(|why| format!(": {why}"));
    format!("{error}{}", why.unwrap_or_default())
}

/// Has NVIDIA's compiler build programs for this device.
fn compile(device: &Device) -> Outcome<()> {
    let compiler =
        Compiler::open(Path::new("libnvrtc.so.13")).map_err(|error| error.to_string())?;
    let capability = |part| {
        let mut value = 0;
        cuda!(device, cuDeviceGetAttribute(&raw mut value, part, 0)).map(|()| value)
    };
    let architecture = format!(
        "compute_{}{}",
        capability(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        capability(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?
    );
    let function = |text: &str, name: &str| {
        let source = Source {
            name,
            text,
            includes: &[],
        };
        let ptx = compiler.ptx(source, &architecture);
        device.function(&ptx.map_err(|error| chain(&error))?, name)
    };
    let vector_add = function(VECTOR_ADD_SOURCE, "vector_add")?;
    for round in 0..8 {
        add(device, vector_add, round)?;
    }
    reduce(device, function(REDUCE_SOURCE, "reduce")?)?;
    // No cache can contain this program.
    let factor = std::process::id();
    let text = format!(
        "extern \"C\" __global__ void scale(unsigned *values) {{ values[threadIdx.x] *= {factor}u; }}"
    );
    scale(device, function(&text, "scale")?, factor)?;
    println!("what was compiled here for {architecture} is right");
    Ok(())
}

/// Sums integers.
fn reduce(device: &Device, function: CUfunction) -> Outcome<()> {
    let numbers: Vec<i32> = (0..10_000).map(|at| at * 7 % 1000 - 300).collect();
    let (mut values, mut total) = (device.upload(&numbers)?, device.upload(&[0u64])?);
    let mut count = numbers.len() as i32;
    let mut arguments = [
        argument(&mut values),
        argument(&mut count),
        argument(&mut total),
    ];
    device.launch(function, ([8, 1], [128, 1], 0), &mut arguments)?;
    let found: Vec<u64> = device.download(total, 1)?;
    let expected: i64 = numbers.iter().map(|number| i64::from(*number)).sum();
    is("the sum of all", found == [expected as u64])
}

/// Multiplies each number.
fn scale(device: &Device, function: CUfunction, factor: u32) -> Outcome<()> {
    let numbers: Vec<u32> = (1..=64).collect();
    let mut values = device.upload(&numbers)?;
    device.launch(function, ([1, 1], [64, 1], 0), &mut [argument(&mut values)])?;
    let found: Vec<u32> = device.download(values, numbers.len())?;
    let products = numbers.iter().map(|number| number.wrapping_mul(factor));
    is("the product", found.into_iter().eq(products))
}

/// Allocates until an allocation fails. Returns how many MiB were allocated, and the error.
fn exhaust(device: &Device) -> Outcome<(usize, String)> {
    let mut held = 0;
    loop {
        let mut at = 0;
        match cuda!(device, cuMemAlloc_v2(&raw mut at, 1 << 20)) {
            Ok(()) => held += 1,
            Err(error) => return Ok((held, error)),
        }
    }
}

fn run() -> Outcome<()> {
    let device = Device::open()?;
    let (mut free, mut all) = (0, 0);
    cuda!(device, cuMemGetInfo_v2(&raw mut free, &raw mut all))?;
    println!("{} MiB of device memory", all >> 20);
    match env::args().nth(1).as_deref() {
        Some("memory") => {
            let (held, error) = exhaust(&device)?;
            println!("{held} MiB were allocated, and then {error}");
        }
        Some("compile") => compile(&device)?,
        Some("busy") => {
            let file = env::args()
                .nth(2)
                .ok_or("busy until which file is there?")?;
            busy(&device, Path::new(&file))?;
        }
        Some("endless") => {
            let function = device.function(VECTOR_ADD, "vector_add")?;
            for round in 0.. {
                add(&device, function, round)?;
                println!("round {round} is right");
            }
        }
        _ => {
            let function = device.function(VECTOR_ADD, "vector_add")?;
            for round in 0..8 {
                add(&device, function, round)?;
            }
            count(&device)?;
            multiply(&device)?;
            print(&device)?;
            println!("sums, counts and products are right");
        }
    }
    Ok(())
}

fn main() -> Result<(), String> {
    // Kernels print to C's standard output, which has its own buffer.
    run().inspect_err(|error| println!("ended: {error}"))
}
