//! Images: creates, maps, fills and copies them, also from and to buffers.

use std::{
    ffi::c_void,
    ptr::{null, null_mut},
};

use remoting_opencl::driver::api::{Handle, ImageDesc, ImageFormat};
use remoting_proto::apis::opencl::codes;

use super::{Part, device::check, device::cl, more::more};

const WIDTH: usize = 8;
const HEIGHT: usize = 4;
/// Four bytes each.
const PIXELS: usize = WIDTH * HEIGHT;
const FORMAT: ImageFormat = ImageFormat {
    order: codes::RGBA,
    data: codes::UNSIGNED_INT8,
};

fn desc() -> ImageDesc {
    ImageDesc {
        kind: codes::MEM_OBJECT_IMAGE2D,
        width: WIDTH,
        height: HEIGHT,
        ..ImageDesc::default()
    }
}

pub fn run(part: &mut Part) -> Result<(), String> {
    let context = part.device.context;
    let support = {
        let mut support = 0u32;
        let to = (&raw mut support).cast();
        cl!(
            part.device.api,
            clGetDeviceInfo(
                part.device.id,
                codes::DEVICE_IMAGE_SUPPORT,
                4,
                to,
                null_mut()
            )
        );
        support
    };
    part.say("CL_DEVICE_IMAGE_SUPPORT", support);
    if support == 0 {
        return Ok(());
    }
    let mut code = 0;
    let mut start: Vec<u32> = (0..PIXELS as u32).collect();
    let from: *mut c_void = start.as_mut_ptr().cast();
    let (format, desc) = (FORMAT, desc());
    let made = more!(
        part,
        clCreateImage2D(
            context,
            codes::MEM_COPY_HOST_PTR,
            &raw const format,
            WIDTH,
            HEIGHT,
            0,
            from,
            &raw mut code
        )
    );
    let first = part.made("clCreateImage2D", made, code).ok_or("no image")?;
    if !part.has("clCreateImageWithProperties") || !part.has("clCreateSamplerWithProperties") {
        return Ok(());
    }
    let made = more!(
        part,
        clCreateImageWithProperties(
            context,
            null(),
            0,
            &raw const format,
            &raw const desc,
            null_mut(),
            &raw mut code
        )
    );
    let second = part
        .made("clCreateImageWithProperties", made, code)
        .ok_or("no image")?;
    let black = [0u32; 4];
    fill(part, second, &black, [0; 3], [WIDTH, HEIGHT, 1]);
    copies(part, first, second)?;
    maps(part, second)?;
    sampled(part, first)?;
    for image in [first, second] {
        check(cl!(part.device.api, clReleaseMemObject(image)), "releasing")?;
    }
    Ok(())
}

fn fill(part: &mut Part, image: Handle, colour: &[u32; 4], origin: [usize; 3], region: [usize; 3]) {
    let filled = cl!(
        part.device.api,
        clEnqueueFillImage(
            part.device.queue,
            image,
            colour.as_ptr().cast(),
            origin.as_ptr(),
            region.as_ptr(),
            0,
            null(),
            null_mut()
        )
    );
    part.say("clEnqueueFillImage", filled);
}

/// Reports the contents of an image.
fn show(part: &mut Part, image: Handle) {
    let mut pixels = [0u32; PIXELS];
    let (origin, region) = ([0usize; 3], [WIDTH, HEIGHT, 1]);
    let read = cl!(
        part.device.api,
        clEnqueueReadImage(
            part.device.queue,
            image,
            1,
            origin.as_ptr(),
            region.as_ptr(),
            0,
            0,
            pixels.as_mut_ptr().cast(),
            0,
            null(),
            null_mut()
        )
    );
    part.say("clEnqueueReadImage", format_args!("{read}, {pixels:x?}"));
}

fn copies(part: &mut Part, first: Handle, second: Handle) -> Result<(), String> {
    let queue = part.device.queue;
    let (from, to, region) = ([1usize, 1, 0], [4usize, 2, 0], [3usize, 2, 1]);
    let copied = cl!(
        part.device.api,
        clEnqueueCopyImage(
            queue,
            first,
            second,
            from.as_ptr(),
            to.as_ptr(),
            region.as_ptr(),
            0,
            null(),
            null_mut()
        )
    );
    part.say("clEnqueueCopyImage", copied);
    show(part, second);
    let buffer = part.numbers(part.device.context, &[-1; 16])?;
    let copied = cl!(
        part.device.api,
        clEnqueueCopyImageToBuffer(
            queue,
            second,
            buffer,
            to.as_ptr(),
            region.as_ptr(),
            8,
            0,
            null(),
            null_mut()
        )
    );
    part.say("clEnqueueCopyImageToBuffer", copied);
    let there = part.contents::<10>(queue, buffer)?;
    part.say("the buffer", format_args!("{there:x?}"));
    let (corner, line) = ([0usize; 3], [4usize, 1, 1]);
    let copied = cl!(
        part.device.api,
        clEnqueueCopyBufferToImage(
            queue,
            buffer,
            second,
            8,
            corner.as_ptr(),
            line.as_ptr(),
            0,
            null(),
            null_mut()
        )
    );
    part.say("clEnqueueCopyBufferToImage", copied);
    show(part, second);
    check(
        cl!(part.device.api, clReleaseMemObject(buffer)),
        "releasing",
    )?;
    Ok(())
}

/// Maps a part of an image. The driver returns the row pitch.
fn map(part: &mut Part, image: Handle, flags: u64) -> Option<(*mut u32, usize)> {
    let (origin, region) = ([2usize, 1, 0], [3usize, 2, 1]);
    let (mut row, mut code) = (0usize, 0);
    let pointer = more!(
        part,
        clEnqueueMapImage(
            part.device.queue,
            image,
            1,
            flags,
            origin.as_ptr(),
            region.as_ptr(),
            &raw mut row,
            null_mut(),
            0,
            null(),
            null_mut(),
            &raw mut code
        )
    );
    part.made("clEnqueueMapImage", pointer as usize, code)?;
    Some((pointer.cast(), row / 4))
}

fn unmap(part: &mut Part, image: Handle, pointer: *mut u32) {
    let unmapped = cl!(
        part.device.api,
        clEnqueueUnmapMemObject(
            part.device.queue,
            image,
            pointer.cast(),
            0,
            null(),
            null_mut()
        )
    );
    part.say("clEnqueueUnmapMemObject", unmapped);
}

fn maps(part: &mut Part, image: Handle) -> Result<(), String> {
    fill(part, image, &[0x11, 0x22, 0x33, 0x44], [2, 1, 0], [2, 1, 1]);
    if let Some((pointer, row)) = map(part, image, codes::MAP_READ | codes::MAP_WRITE) {
        // SAFETY: two rows of three pixels are mapped, at this pitch.
        let seen: Vec<u32> = [0, 1, 2, row, row + 1, row + 2]
            .map(|at| unsafe { pointer.add(at).read() })
            .into();
        part.say("mapped", format_args!("{seen:x?}"));
        // SAFETY: as above.
        unsafe { pointer.add(row + 1).write(0xaabb_ccdd) };
        unmap(part, image, pointer);
    }
    show(part, image);
    if let Some((pointer, row)) = map(part, image, codes::MAP_WRITE_INVALIDATE_REGION) {
        for at in [0, 1, 2, row, row + 1, row + 2] {
            // SAFETY: as above.
            unsafe { pointer.add(at).write(7) };
        }
        unmap(part, image, pointer);
    }
    show(part, image);
    let (origin, region, mut code) = ([0usize; 3], [1usize; 3], 0);
    let pointer = more!(
        part,
        clEnqueueMapImage(
            part.device.queue,
            image,
            1,
            codes::MAP_READ,
            origin.as_ptr(),
            region.as_ptr(),
            null_mut(),
            null_mut(),
            0,
            null(),
            null_mut(),
            &raw mut code
        )
    );
    let call = "clEnqueueMapImage without a row's length";
    part.made(call, pointer as usize, code);
    check(cl!(part.device.api, clFinish(part.device.queue)), "waiting")?;
    Ok(())
}

/// Has a kernel read a row of an image through a sampler.
fn sampled(part: &mut Part, image: Handle) -> Result<(), String> {
    let (context, queue) = (part.device.context, part.device.queue);
    let mut code = 0;
    let list = [
        u64::from(codes::SAMPLER_NORMALIZED_COORDS),
        0,
        u64::from(codes::SAMPLER_FILTER_MODE),
        u64::from(codes::FILTER_NEAREST),
        0,
    ];
    let made = more!(
        part,
        clCreateSamplerWithProperties(context, list.as_ptr(), &raw mut code)
    );
    let made = part.made("clCreateSamplerWithProperties", made, code);
    let sampler = made.ok_or("no sampler")?;
    let wrong = [u64::from(codes::SAMPLER_ADDRESSING_MODE), 77, 0];
    let made = more!(
        part,
        clCreateSamplerWithProperties(context, wrong.as_ptr(), &raw mut code)
    );
    part.made(
        "clCreateSamplerWithProperties of an unknown mode",
        made,
        code,
    );
    for (call, addressing, filter) in [
        (
            "clCreateSampler of an unknown mode",
            77,
            codes::FILTER_NEAREST,
        ),
        (
            "clCreateSampler of an unknown filter",
            codes::ADDRESS_CLAMP,
            77,
        ),
    ] {
        let made = cl!(
            part.device.api,
            clCreateSampler(context, 0, addressing, filter, &raw mut code)
        );
        part.made(call, made, code);
    }
    let [kernel] = part.device.kernels_of(part.program, [c"pixels"])?;
    let out = part.numbers(context, &[0; 4 * WIDTH])?;
    part.device.set(kernel, 0, image)?;
    part.device.set(kernel, 1, sampler)?;
    part.device.set(kernel, 2, out)?;
    let retained = more!(part, clRetainSampler(sampler));
    part.say("clRetainSampler", retained);
    let run = part.device.enqueue(queue, kernel, WIDTH, null_mut());
    part.say("a kernel that samples", run);
    let there = part.contents::<{ 4 * WIDTH }>(queue, out)?;
    part.say("what it read", format_args!("{there:?}"));
    for _ in 0..2 {
        let released = cl!(part.device.api, clReleaseSampler(sampler));
        part.say("clReleaseSampler", released);
    }
    cl!(part.device.api, clReleaseKernel(kernel));
    cl!(part.device.api, clReleaseMemObject(out));
    Ok(())
}
