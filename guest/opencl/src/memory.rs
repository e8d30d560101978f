//! Buffers, images and samplers.

use std::{ffi::c_void, ptr::null_mut, sync::Mutex};

use base::Unpoisoned;
use gantry_client::stage::HostRegion;
use remoting_proto::apis::opencl::{
    calls::{
        CreateBuffer, CreateImage, CreateSampler, CreateSubBuffer, ImageFormats, ImageShape, MemId,
        SamplerId, Target, WindowRange,
    },
    codes,
    image::{ImageDesc, ImageFormat, pixel_size},
};

use crate::{
    abi::{Outcome, array, bytes, entry_points, give, properties, set},
    link,
    object::{self, Context, Handle, Image, Mem, MemDestructor, Object, Own, Sampler, get},
    platform::{ask, limit},
    svm,
};

const ACCESS: u64 = codes::MEM_READ_WRITE | codes::MEM_READ_ONLY | codes::MEM_WRITE_ONLY;
const HOST: u64 = codes::MEM_USE_HOST_PTR | codes::MEM_ALLOC_HOST_PTR | codes::MEM_COPY_HOST_PTR;
const HOST_ACCESS: u64 =
    codes::MEM_HOST_NO_ACCESS | codes::MEM_HOST_READ_ONLY | codes::MEM_HOST_WRITE_ONLY;

/// Checks flags and the pointer that belongs to them.
fn check(flags: u64, host: *mut c_void) -> Outcome {
    let known = ACCESS | HOST | HOST_ACCESS | codes::MEM_KERNEL_READ_AND_WRITE;
    let both = codes::MEM_ALLOC_HOST_PTR | codes::MEM_COPY_HOST_PTR;
    if flags & !known != 0
        || (flags & ACCESS).count_ones() > 1
        || (flags & HOST_ACCESS).count_ones() > 1
        || flags & codes::MEM_USE_HOST_PTR != 0 && flags & both != 0
    {
        return Err(codes::INVALID_VALUE);
    }
    let wanted = flags & (codes::MEM_USE_HOST_PTR | codes::MEM_COPY_HOST_PTR) != 0;
    if wanted == host.is_null() {
        return Err(codes::INVALID_HOST_PTR);
    }
    Ok(())
}

fn buffer(
    context: Handle<Context>,
    flags: u64,
    size: usize,
    host: *mut c_void,
    properties: Vec<u64>,
) -> Outcome<Handle<Mem>> {
    let context = get(context)?;
    check(flags, host)?;
    let size = size as u64;
    let mut largest = 0;
    for device in &context.it.devices {
        largest = largest.max(limit(device, codes::DEVICE_MAX_MEM_ALLOC_SIZE)?);
    }
    if size == 0 || size > largest {
        return Err(codes::INVALID_BUFFER_SIZE);
    }
    let link = link::connected()?;
    let uses = flags & codes::MEM_USE_HOST_PTR != 0;
    // Memory that host and device share is in the window, if that is shared and has room for it.
    let in_window = link.shared(host.cast_const().cast(), size);
    let svm = uses && svm::has(context, host, size as usize);
    let lives = if svm {
        None
    } else if uses {
        in_window.map(|offset| (offset, 0))
    } else if flags & codes::MEM_ALLOC_HOST_PTR != 0 {
        link.reserve_shared(size).map(|offset| {
            link.hand_out(offset, size);
            (offset, size)
        })
    } else {
        None
    };
    let mut contents = None;
    // Contents in shared virtual memory are already in place.
    if flags & (codes::MEM_COPY_HOST_PTR | codes::MEM_USE_HOST_PTR) != 0 && !svm {
        let data = HostRegion::flat(host.cast(), size as usize);
        match (lives, in_window) {
            (Some((_, 0)), _) => {}
            // SAFETY: the application guarantees its memory, here and below, as the API requires.
            (Some((offset, _)), _) => unsafe { link.fill(offset, &data, link.reader())? },
            (None, Some(offset)) => {
                contents = Some(WindowRange {
                    offset,
                    length: size,
                    stage: None,
                });
            }
            // SAFETY: see above.
            (None, None) => contents = Some(unsafe { link.stage_copy(&data)? }),
        }
    }
    let id = MemId(link.state.ids.mems.take());
    let call = CreateBuffer {
        id,
        context: context.it.id,
        flags: flags & !HOST,
        size,
        // Contents that the application may change as soon as this returns are waited for.
        contents,
        lives: lives.map(|(offset, _)| offset),
        svm: svm.then_some(host as u64),
    };
    let borrowed = call
        .contents
        .as_ref()
        .is_some_and(|place| place.stage.is_none());
    let sent = if borrowed {
        link.ask(&call)
    } else {
        link.post(&call)
    };
    let mem = Object::handle(Mem {
        id,
        context: context.keep(),
        flags,
        size,
        host: if uses { host.cast() } else { null_mut() },
        svm,
        parent: None,
        origin: 0,
        lives,
        image: None,
        maps: Mutex::default(),
        destructors: Mutex::default(),
        properties,
    });
    if let Err(code) = sent {
        object::release(mem)?;
        return Err(code);
    }
    Ok(mem)
}

entry_points! {
    fn clCreateBuffer(context: Handle<Context>, flags: u64, size: usize, host: *mut c_void) -> Handle<Mem> {
        buffer(context, flags, size, host, Vec::new())
    }
}

/// Memory properties. None are known, so only an empty list is valid.
fn none_known(list: *const u64) -> Outcome<Vec<u64>> {
    match (list.is_null(), properties(list.cast()).is_empty()) {
        (true, _) => Ok(Vec::new()),
        (false, true) => Ok(vec![0]),
        (false, false) => Err(codes::INVALID_PROPERTY),
    }
}

entry_points! {
    fn clCreateBufferWithProperties(
        context: Handle<Context>, properties: *const u64, flags: u64, size: usize, host: *mut c_void
    ) -> Handle<Mem> {
        let properties = none_known(properties)?;
        buffer(context, flags, size, host, properties)
    }

    fn clCreateSubBuffer(of: Handle<Mem>, flags: u64, kind: u32, region: *const c_void) -> Handle<Mem> {
        let of = get(of)?;
        if of.it.parent.is_some() || of.it.image.is_some() {
            return Err(codes::INVALID_MEM_OBJECT);
        }
        if kind != codes::BUFFER_CREATE_TYPE_REGION || region.is_null() || flags & HOST != 0 {
            return Err(codes::INVALID_VALUE);
        }
        let parent = of.it.flags;
        let access = flags & ACCESS;
        let narrowed = parent & (codes::MEM_READ_ONLY | codes::MEM_WRITE_ONLY);
        if access.count_ones() > 1
            || (flags & HOST_ACCESS).count_ones() > 1
            || narrowed != 0 && access & !narrowed != 0
        {
            return Err(codes::INVALID_VALUE);
        }
        let region = array(region.cast::<usize>(), 2);
        let (origin, size) = (region[0] as u64, region[1] as u64);
        if size == 0 {
            return Err(codes::INVALID_BUFFER_SIZE);
        }
        if origin.checked_add(size).is_none_or(|end| end > of.it.size) {
            return Err(codes::INVALID_VALUE);
        }
        let mut aligned = false;
        for device in &of.it.context.it.devices {
            let bits = limit(device, codes::DEVICE_MEM_BASE_ADDR_ALIGN)?;
            aligned |= origin.is_multiple_of((bits / 8).max(1));
        }
        let inherit = |mask| {
            if flags & mask == 0 {
                parent & mask
            } else {
                flags & mask
            }
        };
        let link = link::connected()?;
        let id = MemId(link.state.ids.mems.take());
        let call = CreateSubBuffer {
            id,
            of: of.it.id,
            flags,
            origin,
            size,
        };
        // Some drivers accept an origin that is misaligned for their devices. They have to decide.
        let asked = if aligned {
            link.post(&call)
        } else {
            link.ask(&call)
        };
        let mem = Object::handle(Mem {
            id,
            context: of.it.context.keep(),
            flags: inherit(ACCESS) | inherit(HOST_ACCESS) | parent & HOST,
            size,
            host: if of.it.host.is_null() {
                null_mut()
            } else {
                of.it.host.wrapping_add(origin as usize)
            },
            svm: of.it.svm,
            parent: Some(of.keep()),
            origin,
            lives: of.it.lives.map(|(offset, _)| (offset + origin, 0)),
            image: None,
            maps: Mutex::default(),
            destructors: Mutex::default(),
            properties: Vec::new(),
        });
        if let Err(code) = asked {
            object::release(mem)?;
            return Err(code);
        }
        Ok(mem)
    }
}

fn image(
    context: Handle<Context>,
    flags: u64,
    format: *const ImageFormat,
    desc: *const ImageDesc,
    host: *mut c_void,
    properties: Vec<u64>,
) -> Outcome<Handle<Mem>> {
    let context = get(context)?;
    let format = *array(format, usize::from(!format.is_null()))
        .first()
        .ok_or(codes::INVALID_IMAGE_FORMAT_DESCRIPTOR)?;
    let desc = *array(desc, usize::from(!desc.is_null()))
        .first()
        .ok_or(codes::INVALID_IMAGE_DESCRIPTOR)?;
    let pixel =
        pixel_size(format.order, format.data).ok_or(codes::INVALID_IMAGE_FORMAT_DESCRIPTOR)?;
    let parent: Option<Own<Mem>> = match desc.of {
        0 => None,
        handle => Some(get(handle as Handle<Mem>)?.keep()),
    };
    if parent.is_none() {
        check(flags, host)?;
    }
    let (extent, layers) = extent(&desc)?;
    let [width, height, _] = extent;
    let tight = width.checked_mul(pixel).ok_or(codes::INVALID_IMAGE_SIZE)?;
    let row_pitch = match desc.row_pitch as u64 {
        0 => tight,
        _ if host.is_null() && parent.is_none() => return Err(codes::INVALID_IMAGE_DESCRIPTOR),
        pitch if pitch < tight => return Err(codes::INVALID_IMAGE_DESCRIPTOR),
        pitch => pitch,
    };
    let (rows, slices) = match desc.kind {
        codes::MEM_OBJECT_IMAGE1D_ARRAY => (1, layers),
        codes::MEM_OBJECT_IMAGE2D_ARRAY => (height, layers),
        _ => (height.max(1), depth_of(&extent)),
    };
    let slice_pitch = match desc.slice_pitch as u64 {
        0 => row_pitch * rows,
        pitch => pitch,
    };
    let link = link::connected()?;
    let data = HostRegion {
        start: host.cast(),
        row: tight as usize,
        rows: rows as usize,
        slices: slices as usize,
        row_pitch: row_pitch as usize,
        slice_pitch: slice_pitch as usize,
    };
    let contents = (!host.is_null())
        // SAFETY: the application guarantees its memory, as the API requires.
        .then(|| unsafe { link.stage_copy(&data) })
        .transpose()?;
    let id = MemId(link.state.ids.mems.take());
    let asked = link.ask(&CreateImage {
        id,
        context: context.it.id,
        flags: flags & !HOST,
        shape: ImageShape {
            order: format.order,
            data: format.data,
            kind: desc.kind,
            extent,
            layers,
            of: parent.as_ref().map(|parent| parent.it.id),
        },
        contents,
    });
    let mem = Object::handle(Mem {
        id,
        context: context.keep(),
        flags,
        size: tight * rows * slices,
        host: if flags & codes::MEM_USE_HOST_PTR != 0 {
            host.cast()
        } else {
            null_mut()
        },
        svm: false,
        parent,
        origin: 0,
        lives: None,
        image: Some(Image {
            kind: desc.kind,
            extent,
            layers,
            pixel,
        }),
        maps: Mutex::default(),
        destructors: Mutex::default(),
        properties,
    });
    if let Err(code) = asked {
        object::release(mem)?;
        return Err(code);
    }
    Ok(mem)
}

/// The width, height and depth of an image, and its layers. Zero for what its type does not have.
fn extent(desc: &ImageDesc) -> Outcome<([u64; 3], u64)> {
    let (width, height, depth) = (desc.width as u64, desc.height as u64, desc.depth as u64);
    let layers = desc.layers as u64;
    Ok(match desc.kind {
        codes::MEM_OBJECT_IMAGE1D | codes::MEM_OBJECT_IMAGE1D_BUFFER => ([width, 0, 0], 0),
        codes::MEM_OBJECT_IMAGE1D_ARRAY => ([width, 0, 0], layers),
        codes::MEM_OBJECT_IMAGE2D => ([width, height, 0], 0),
        codes::MEM_OBJECT_IMAGE2D_ARRAY => ([width, height, 0], layers),
        codes::MEM_OBJECT_IMAGE3D => ([width, height, depth], 0),
        _ => return Err(codes::INVALID_IMAGE_DESCRIPTOR),
    })
}

fn depth_of(extent: &[u64; 3]) -> u64 {
    extent[2].max(1)
}

entry_points! {
    fn clCreateImage(
        context: Handle<Context>, flags: u64, format: *const ImageFormat, desc: *const ImageDesc,
        host: *mut c_void
    ) -> Handle<Mem> {
        image(context, flags, format, desc, host, Vec::new())
    }

    fn clCreateImageWithProperties(
        context: Handle<Context>, properties: *const u64, flags: u64, format: *const ImageFormat,
        desc: *const ImageDesc, host: *mut c_void
    ) -> Handle<Mem> {
        let properties = none_known(properties)?;
        image(context, flags, format, desc, host, properties)
    }
}

pub extern "C" fn clCreateImage2D(
    context: Handle<Context>,
    flags: u64,
    format: *const ImageFormat,
    width: usize,
    height: usize,
    row_pitch: usize,
    host: *mut c_void,
    errcode_ret: *mut i32,
) -> Handle<Mem> {
    let desc = ImageDesc {
        kind: codes::MEM_OBJECT_IMAGE2D,
        width,
        height,
        row_pitch,
        ..ImageDesc::default()
    };
    clCreateImage(context, flags, format, &raw const desc, host, errcode_ret)
}

pub extern "C" fn clCreateImage3D(
    context: Handle<Context>,
    flags: u64,
    format: *const ImageFormat,
    width: usize,
    height: usize,
    depth: usize,
    row_pitch: usize,
    slice_pitch: usize,
    host: *mut c_void,
    errcode_ret: *mut i32,
) -> Handle<Mem> {
    let desc = ImageDesc {
        kind: codes::MEM_OBJECT_IMAGE3D,
        width,
        height,
        depth,
        row_pitch,
        slice_pitch,
        ..ImageDesc::default()
    };
    clCreateImage(context, flags, format, &raw const desc, host, errcode_ret)
}

entry_points! {
    fn clRetainMemObject(mem: Handle<Mem>) {
        object::retain(mem)
    }

    fn clReleaseMemObject(mem: Handle<Mem>) {
        object::release(mem)
    }

    fn clGetSupportedImageFormats(
        context: Handle<Context>, flags: u64, kind: u32, count: u32, formats: *mut ImageFormat,
        count_ret: *mut u32
    ) {
        let context = get(context)?;
        if !formats.is_null() && count == 0 {
            return Err(codes::INVALID_VALUE);
        }
        let found = link::connected()?.ask(&ImageFormats {
            context: context.it.id,
            flags,
            kind,
        })?;
        // Only formats whose pixel size this driver knows.
        let found: Vec<_> = found
            .into_iter()
            .filter(|(order, data)| pixel_size(*order, *data).is_some())
            .collect();
        if !formats.is_null() {
            for (index, &(order, data)) in found.iter().enumerate().take(count as usize) {
                set(formats.wrapping_add(index), ImageFormat { order, data });
            }
        }
        set(count_ret, found.len() as u32);
        Ok(())
    }

    fn clGetMemObjectInfo(
        mem: Handle<Mem>, name: u32, size: usize, value: *mut c_void, size_ret: *mut usize
    ) {
        let mem = get(mem)?;
        let it = &mem.it;
        let kind = it
            .image
            .map_or(codes::MEM_OBJECT_BUFFER, |image| image.kind);
        let answer = match name {
            codes::MEM_TYPE => bytes(&[kind]),
            codes::MEM_FLAGS if it.flags & ACCESS == 0 => {
                bytes(&[it.flags | codes::MEM_READ_WRITE])
            }
            codes::MEM_FLAGS => bytes(&[it.flags]),
            codes::MEM_SIZE if it.image.is_none() => bytes(&[it.size]),
            codes::MEM_HOST_PTR => bytes(&[it.host]),
            codes::MEM_MAP_COUNT => {
                let maps = it.maps.lock_unpoisoned();
                bytes(&[maps.len() as u32])
            }
            codes::MEM_REFERENCE_COUNT => bytes(&[mem.count()]),
            codes::MEM_CONTEXT => bytes(&[it.context.pointer()]),
            codes::MEM_ASSOCIATED_MEMOBJECT => {
                let parent = it.parent.as_ref();
                bytes(&[parent.map_or(null_mut(), |parent| parent.pointer())])
            }
            codes::MEM_OFFSET => bytes(&[it.origin]),
            codes::MEM_USES_SVM_POINTER => bytes(&[u32::from(it.svm)]),
            codes::MEM_PROPERTIES => bytes(&it.properties),
            _ => ask(Target::Mem(it.id), name)?,
        };
        give(&answer, size, value, size_ret)
    }

    fn clGetImageInfo(mem: Handle<Mem>, name: u32, size: usize, value: *mut c_void, size_ret: *mut usize) {
        let mem = get(mem)?;
        if mem.it.image.is_none() {
            return Err(codes::INVALID_MEM_OBJECT);
        }
        let answer = match name {
            codes::IMAGE_BUFFER => {
                let parent = mem.it.parent.as_ref();
                bytes(&[parent.map_or(null_mut(), |parent| parent.pointer())])
            }
            _ => ask(Target::Image(mem.it.id), name)?,
        };
        give(&answer, size, value, size_ret)
    }

    fn clSetMemObjectDestructorCallback(
        mem: Handle<Mem>, notify: Option<extern "C" fn(*mut c_void, *mut c_void)>, data: *mut c_void
    ) {
        let mem = get(mem)?;
        let entry: MemDestructor = (notify.ok_or(codes::INVALID_VALUE)?, data as usize);
        let mut destructors = mem.it.destructors.lock_unpoisoned();
        destructors.push(entry);
        Ok(())
    }
}

/// Whether there is no reason to refuse such a sampler. The host's driver decides what the
/// specification leaves undefined, and which modes it does not know.
fn is_usual(
    context: &Object<Context>,
    normalized: bool,
    addressing: u32,
    filter: u32,
) -> Outcome<bool> {
    let addressable = match addressing {
        codes::ADDRESS_NONE | codes::ADDRESS_CLAMP_TO_EDGE | codes::ADDRESS_CLAMP => true,
        codes::ADDRESS_REPEAT | codes::ADDRESS_MIRRORED_REPEAT => normalized,
        _ => false,
    };
    let filtered = matches!(filter, codes::FILTER_NEAREST | codes::FILTER_LINEAR);
    for device in &context.it.devices {
        if limit(device, codes::DEVICE_IMAGE_SUPPORT)? == 0 {
            return Ok(false);
        }
    }
    Ok(addressable && filtered)
}

fn sampler(
    context: Handle<Context>,
    normalized: u32,
    addressing: u32,
    filter: u32,
) -> Outcome<Handle<Sampler>> {
    let context = get(context)?;
    let link = link::connected()?;
    if normalized > 1 {
        return Err(codes::INVALID_VALUE);
    }
    let id = SamplerId(link.state.ids.samplers.take());
    let call = CreateSampler {
        id,
        context: context.it.id,
        normalized: normalized != 0,
        addressing,
        filter,
    };
    let asked = if is_usual(context, normalized != 0, addressing, filter)? {
        link.post(&call)
    } else {
        link.ask(&call)
    };
    let sampler = Object::handle(Sampler {
        id,
        context: context.keep(),
    });
    if let Err(code) = asked {
        object::release(sampler)?;
        return Err(code);
    }
    Ok(sampler)
}

entry_points! {
    fn clCreateSampler(
        context: Handle<Context>, normalized: u32, addressing: u32, filter: u32
    ) -> Handle<Sampler> {
        sampler(context, normalized, addressing, filter)
    }

    fn clCreateSamplerWithProperties(context: Handle<Context>, list: *const isize) -> Handle<Sampler> {
        let (mut normalized, mut addressing, mut filter) =
            (1, codes::ADDRESS_CLAMP, codes::FILTER_NEAREST);
        for pair in properties(list).as_chunks::<2>().0 {
            match pair[0] as u32 {
                codes::SAMPLER_NORMALIZED_COORDS => normalized = pair[1] as u32,
                codes::SAMPLER_ADDRESSING_MODE => addressing = pair[1] as u32,
                codes::SAMPLER_FILTER_MODE => filter = pair[1] as u32,
                _ => return Err(codes::INVALID_VALUE),
            }
        }
        sampler(context, normalized, addressing, filter)
    }

    fn clRetainSampler(sampler: Handle<Sampler>) {
        object::retain(sampler)
    }

    fn clReleaseSampler(sampler: Handle<Sampler>) {
        object::release(sampler)
    }

    fn clGetSamplerInfo(
        sampler: Handle<Sampler>, name: u32, size: usize, value: *mut c_void, size_ret: *mut usize
    ) {
        let sampler = get(sampler)?;
        let answer = match name {
            codes::SAMPLER_REFERENCE_COUNT => bytes(&[sampler.count()]),
            codes::SAMPLER_CONTEXT => bytes(&[sampler.it.context.pointer()]),
            _ => ask(Target::Sampler(sampler.it.id), name)?,
        };
        give(&answer, size, value, size_ret)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn a_sampler_of_usual_modes_is_not_waited_for_and_what_is_wrong_is_told_by_its_maker() {
        let _alone = testing::alone();
        let context = testing::context();
        let make = |normalized, addressing, filter| {
            let mut code = 1;
            let sampler = clCreateSampler(context, normalized, addressing, filter, &raw mut code);
            assert_eq!(code == 0, !sampler.is_null());
            code
        };
        testing::refuse_samplers(true);
        let usual = make(0, codes::ADDRESS_CLAMP, codes::FILTER_NEAREST);
        let strange = [
            make(0, 77, codes::FILTER_NEAREST),
            make(1, codes::ADDRESS_CLAMP, 77),
            make(0, codes::ADDRESS_REPEAT, codes::FILTER_LINEAR),
        ];
        testing::refuse_samplers(false);
        assert_eq!(usual, 0);
        assert_eq!(strange, [codes::INVALID_VALUE; 3]);
        assert_eq!(make(1, codes::ADDRESS_REPEAT, codes::FILTER_LINEAR), 0);
    }
}
