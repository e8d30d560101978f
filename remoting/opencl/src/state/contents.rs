//! Copies the bytes of buffers and images to an image file and back.
//!
//! Each is copied in pieces through memory of this process, by a queue that is created for it. A buffer that the host
//! may not read or write is copied through a temporary buffer that it may access.

use std::{collections::HashMap, ops::Range, ptr::null, ptr::null_mut, sync::Arc};

use remoting_proto::apis::opencl::{codes, image};
use remoting_session::image::{Contents, Immovable};

use super::{Bytes, Mapping, log::Log};
use crate::{
    Server,
    driver::{
        api::{Api, Handle},
        cl,
    },
    objects::{MadeMem, Map, Mem, made},
    provenance::{ContextRecord, DeviceRecord, MemRecord},
    written::{Written, root},
};

/// Maximum size of a piece, in bytes.
const PIECE: u64 = 4 << 20;

/// Fails with the operation and the object concerned.
pub(super) fn check(code: i32, what: &str) -> Result<(), Immovable> {
    match code {
        0 => Ok(()),
        code => Err(Immovable::Refused {
            what: what.to_owned(),
            code,
        }),
    }
}

/// Queues for copies, by context.
#[derive(Debug, Default)]
pub(super) struct Queues(HashMap<Handle, Handle>);

impl Queues {
    pub fn of(
        &mut self,
        server: &Server,
        context: Handle,
        record: &ContextRecord,
    ) -> Result<Handle, Immovable> {
        if let Some(queue) = self.0.get(&context) {
            return Ok(*queue);
        }
        let device = server.device_of(context, record)?;
        let mut code = 0;
        let raw = cl!(
            server.backend.api,
            clCreateCommandQueue(context, device, 0, &raw mut code)
        );
        let queue = made(raw, code).map_err(|code| Immovable::Refused {
            what: "a queue for copies".to_owned(),
            code,
        })?;
        self.0.insert(context, queue);
        Ok(queue)
    }

    /// Releases the queues.
    pub fn end(self, api: &Api) {
        for queue in self.0.into_values() {
            cl!(api, clReleaseCommandQueue(queue));
        }
    }
}

impl Server {
    /// Finds a device of a context.
    fn device_of(&self, context: Handle, record: &ContextRecord) -> Result<Handle, Immovable> {
        for of in &record.devices {
            let same = |device: &&super::super::objects::Device| match (&*device.record, &**of) {
                (DeviceRecord::Offered(one), DeviceRecord::Offered(other)) => one == other,
                _ => Arc::ptr_eq(&device.record, of),
            };
            if let Some(device) = self.backend.devices.iter().find(same) {
                return Ok(device.raw);
            }
        }
        // Sub-devices that the application has released.
        let mut devices = [0 as Handle; 64];
        let code = cl!(
            self.backend.api,
            clGetContextInfo(
                context,
                codes::CONTEXT_DEVICES,
                size_of_val(&devices),
                devices.as_mut_ptr().cast(),
                null_mut(),
            )
        );
        match devices[0] {
            0 => check(code.min(-1), "the devices of a context").map(|()| 0),
            device => Ok(device),
        }
    }
}

/// What is copied.
#[derive(Clone, Copy, Debug)]
enum Shape {
    /// A number of bytes.
    Plain(u64),
    /// A number of pixels per dimension, and the bytes per pixel.
    Pixels([usize; 3], u64),
}

impl Shape {
    /// `None` if the size is not known.
    fn of(record: &MemRecord) -> Option<Self> {
        Some(match &record.call {
            MadeMem::Buffer(call) => Self::Plain(call.size),
            MadeMem::Sub(call) => Self::Plain(call.size),
            MadeMem::Image(call) => {
                let shape = &call.shape;
                let [width, height, depth] = shape.extent.map(|extent| extent.max(1) as usize);
                let layers = shape.layers.max(1) as usize;
                let region = match shape.kind {
                    codes::MEM_OBJECT_IMAGE1D | codes::MEM_OBJECT_IMAGE1D_BUFFER => [width, 1, 1],
                    codes::MEM_OBJECT_IMAGE1D_ARRAY => [width, layers, 1],
                    codes::MEM_OBJECT_IMAGE2D => [width, height, 1],
                    codes::MEM_OBJECT_IMAGE2D_ARRAY => [width, height, layers],
                    _ => [width, height, depth],
                };
                Self::Pixels(region, image::pixel_size(shape.order, shape.data)?)
            }
        })
    }

    fn length(self) -> Option<u64> {
        match self {
            Self::Plain(length) => Some(length),
            Self::Pixels(region, pixel) => region
                .into_iter()
                .try_fold(pixel, |all, count| all.checked_mul(count as u64)),
        }
    }
}

/// The place of a buffer that lives in the window: such a buffer needs no contents in the image.
fn lives(record: &MemRecord) -> Option<(u64, u64)> {
    match &record.call {
        MadeMem::Buffer(call) => call.lives.map(|offset| (offset, call.size)),
        _ => None,
    }
}

/// A buffer or image that shares no other object's bytes.
#[derive(Debug)]
pub(super) struct Root {
    /// Its number in the log.
    pub number: u32,
    pub context: Handle,
    /// One of the context's devices.
    pub device: Handle,
    pub mem: Handle,
    shape: Shape,
    /// Size in bytes.
    pub length: u64,
    /// The parts of it that have contents.
    pub parts: Vec<Range<u64>>,
    /// Whether it may have been written since it was last copied, or has never been copied.
    pub is_written: bool,
}

impl Root {
    /// Describes the object with this number in the log.
    pub fn of(
        server: &Server,
        number: u32,
        mem: &Mem,
        is_written: bool,
    ) -> Result<Self, Immovable> {
        let shape = Shape::of(&mem.record);
        let sizes = shape.and_then(|shape| Some((shape, shape.length()?)));
        let (shape, length) = sizes.ok_or_else(|| {
            Immovable::Has("it has an image of a format that is not known here".to_owned())
        })?;
        Ok(Self {
            number,
            context: mem.home.raw,
            device: server.device_of(mem.home.raw, &mem.record.context)?,
            mem: mem.raw,
            shape,
            length,
            parts: parts(&mem.record, length),
            is_written,
        })
    }

    /// The same, with contents everywhere.
    pub fn whole(self) -> Self {
        let all = 0..self.length;
        let parts = Some(all).into_iter().collect();
        Self { parts, ..self }
    }

    /// Whether it is a buffer.
    pub fn is_plain(&self) -> bool {
        matches!(self.shape, Shape::Plain(_))
    }

    /// The number of bytes with contents.
    pub fn bytes(&self) -> u64 {
        bytes(&self.parts)
    }

    fn transfer<'a>(&self, api: &'a Api, queue: Handle) -> Transfer<'a> {
        Transfer {
            api,
            context: self.context,
            queue,
            mem: self.mem,
        }
    }

    /// Passes the bytes of a part to `to`, with their offset. An image has a single part.
    pub fn read(
        &self,
        api: &Api,
        queue: Handle,
        part: &Range<u64>,
        to: impl FnMut(u64, &[u8]) -> Result<(), Immovable>,
    ) -> Result<(), Immovable> {
        self.transfer(api, queue).read(self.shape, part, to)
    }

    /// Writes parts of its bytes from an image.
    pub fn write(
        &self,
        api: &Api,
        queue: Handle,
        parts: &[Bytes],
        contents: &Contents,
    ) -> Result<(), Immovable> {
        let transfer = self.transfer(api, queue);
        let mut own = parts.iter().filter(|part| part.mem == self.number);
        own.try_for_each(|part| transfer.restore(self.shape, part, contents))
    }
}

/// The parts with contents of an object of this length.
fn parts(record: &Arc<MemRecord>, length: u64) -> Vec<Range<u64>> {
    root(record).touched.parts(length)
}

fn bytes(parts: &[Range<u64>]) -> u64 {
    // The parts do not overlap.
    parts.iter().map(|part| part.end - part.start).sum()
}

/// The buffers and images that have bytes of their own, outside the window: one for all objects that share the bytes.
fn owners(server: &Server) -> impl Iterator<Item = &Mem> {
    let live: Vec<_> = server.backend.mems.iter().map(|mem| &mem.record).collect();
    server.backend.mems.iter().filter(move |mem| {
        let root = root(&mem.record);
        Arc::ptr_eq(root, &mem.record) || !live.iter().any(|other| Arc::ptr_eq(other, root))
    })
}

/// All objects whose bytes have to be saved unless they are unchanged since they were copied: these may have been
/// written since.
pub(super) fn roots(server: &Server, log: &Log, written: &Written) -> Result<Vec<Root>, Immovable> {
    let mut roots = Vec::new();
    for mem in owners(server) {
        if lives(root(&mem.record)).is_some() {
            continue;
        }
        let number = log.known_mem(&mem.record);
        let number = number.ok_or(Immovable::Wrong("a buffer that is not in the log"))?;
        roots.push(Root::of(server, number, mem, written.has(&mem.record))?);
    }
    Ok(roots)
}

/// Total bytes of objects that are not in the log: all of their contents have to be saved.
pub(super) fn made_since(server: &Server, log: &Log) -> u64 {
    let made = owners(server)
        .filter(|mem| lives(root(&mem.record)).is_none() && log.known_mem(&mem.record).is_none());
    let lengths = made.filter_map(|mem| {
        let length = Shape::of(&mem.record)?.length()?;
        Some(bytes(&parts(&mem.record, length)))
    });
    lengths.fold(0, u64::saturating_add)
}

/// Makes the driver write what the device holds of buffers in the window back to the window. Mapped parts are skipped:
/// there the host's pages are authoritative.
pub(super) fn sync(server: &Server) -> Result<(), Immovable> {
    let mems = server.backend.mems.iter();
    let maps = mems.flat_map(|mem| {
        let of = |map: &Map| (&mem.record, map.offset, map.size);
        mem.maps.iter().map(of)
    });
    in_window(
        server,
        &maps.collect::<Vec<_>>(),
        |transfer, part, start| transfer.sync(server, part, start),
    )
}

/// Makes the driver reread buffers that live in the window and that it created before all contents were there: a driver
/// may cache the contents of such a buffer (OpenCL 3.0, 5.2.1, `CL_MEM_USE_HOST_PTR`). Parts that are to be mapped are
/// skipped, because the client may be writing there; the driver takes them when the mapping ends.
pub(super) fn renew(server: &Server, maps: &[Mapping]) -> Result<(), Immovable> {
    let maps = maps.iter().filter_map(|map| {
        let mem = server.backend.mems.get(map.mem.0).ok()?;
        Some((&mem.record, map.offset, map.size))
    });
    in_window(
        server,
        &maps.collect::<Vec<_>>(),
        |transfer, (offset, length), start| {
            transfer.write_part(offset, length, |from, bytes| {
                let place = server.window.at(start + from, bytes.len() as u64);
                let place = place.ok_or(Immovable::Wrong("a buffer beyond the window"))?;
                // SAFETY: within the window, which stays mapped as long as the session. The client may write there,
                // too, so no reference to it is made.
                unsafe { place.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
                Ok(())
            })
        },
    )
}

/// A mapping: the buffer, the first byte, the size in bytes.
type Mapped<'a> = (&'a Arc<MemRecord>, u64, u64);

/// Calls `each` for each unmapped part of the buffers that live in the window. It receives the part's offset and size
/// within the object, and the object's offset in the window.
fn in_window(
    server: &Server,
    maps: &[Mapped<'_>],
    mut each: impl FnMut(&Transfer<'_>, (u64, u64), u64) -> Result<(), Immovable>,
) -> Result<(), Immovable> {
    let mut queues = Queues::default();
    for mem in owners(server) {
        let whole = lives(root(&mem.record)).zip(extent(&mem.record));
        let Some(((start, _), (origin, size))) = whole else {
            continue;
        };
        let transfer = Transfer {
            api: &server.backend.api,
            context: mem.home.raw,
            queue: queues.of(server, mem.home.raw, &mem.record.context)?,
            mem: mem.raw,
        };
        for part in outside(mapped(&mem.record, maps), size) {
            each(&transfer, part, start.saturating_add(origin))?;
        }
    }
    queues.end(&server.backend.api);
    Ok(())
}

/// The range that a buffer occupies in its parent: first byte and size.
fn extent(record: &MemRecord) -> Option<(u64, u64)> {
    match &record.call {
        MadeMem::Buffer(call) => Some((0, call.size)),
        MadeMem::Sub(call) => {
            let (origin, _) = extent(record.of.as_ref()?)?;
            Some((origin.saturating_add(call.origin), call.size))
        }
        MadeMem::Image(_) => None,
    }
}

/// The parts of a buffer that are mapped, through itself or through a buffer that shares bytes with it.
fn mapped(record: &Arc<MemRecord>, maps: &[Mapped<'_>]) -> Vec<(u64, u64)> {
    let Some((origin, size)) = extent(record) else {
        return Vec::new();
    };
    let part = |&(of, offset, length): &Mapped<'_>| {
        if !Arc::ptr_eq(root(of), root(record)) {
            return None;
        }
        let start = extent(of)?.0.saturating_add(offset);
        let end = start.saturating_add(length);
        let [start, end] = [start, end].map(|at| at.saturating_sub(origin).min(size));
        Some((start, end - start))
    };
    maps.iter().filter_map(part).collect()
}

/// Restores the contents of buffers and images, by their numbers in the log.
pub(super) fn restore(
    server: &mut Server,
    all: &[Bytes],
    contents: &Contents,
) -> Result<(), Immovable> {
    let mut queues = Queues::default();
    for part in all {
        server.works()?;
        let mem = server.backend.mems.get(part.mem);
        let mem = mem.map_err(|_| Immovable::Wrong("contents of no buffer"))?;
        let shape = Shape::of(&mem.record).ok_or(Immovable::Wrong("contents of no image"))?;
        let queue = queues.of(server, mem.home.raw, &mem.record.context)?;
        let transfer = Transfer {
            api: &server.backend.api,
            context: mem.home.raw,
            queue,
            mem: mem.raw,
        };
        // Here, too, it has contents, which must be taken along in the next move.
        root(&mem.record).touched.part(part.from, part.length);
        transfer.restore(shape, part, contents)?;
    }
    queues.end(&server.backend.api);
    Ok(())
}

/// Copies of one object.
#[derive(Debug)]
struct Transfer<'a> {
    api: &'a Api,
    context: Handle,
    queue: Handle,
    mem: Handle,
}

impl Transfer<'_> {
    /// A buffer of this size that the host may read and write.
    fn beside(&self, length: usize) -> Result<Handle, Immovable> {
        let mut code = 0;
        let raw = cl!(
            self.api,
            clCreateBuffer(self.context, 0, length, null_mut(), &raw mut code)
        );
        made(raw, code).map_err(|code| Immovable::Refused {
            what: format!("{length} bytes for a copy"),
            code,
        })
    }

    /// The rows of an image that make up each piece.
    fn rows([width, height, depth]: [usize; 3], pixel: u64) -> impl Iterator<Item = Rows> {
        // A row fits in memory: the driver has created the image.
        let row = width as u64 * pixel;
        let most = ((PIECE / row.max(1)).max(1) as usize).min(height);
        (0..depth).flat_map(move |z| {
            (0..height).step_by(most).map(move |y| Rows {
                origin: [0, y, z],
                region: [width, most.min(height - y), 1],
                from: (z * height + y) as u64 * row,
                length: most.min(height - y) * row as usize,
            })
        })
    }

    /// Passes the bytes of a part, or all of an image, to `to`, with their offset.
    fn read(
        &self,
        shape: Shape,
        part: &Range<u64>,
        mut to: impl FnMut(u64, &[u8]) -> Result<(), Immovable>,
    ) -> Result<(), Immovable> {
        let mut bytes = Vec::new();
        match shape {
            Shape::Plain(_) => {
                let mut from = part.start;
                while from < part.end {
                    let piece = PIECE.min(part.end - from) as usize;
                    bytes.resize(piece, 0);
                    self.read_bytes(from as usize, &mut bytes)?;
                    to(from, &bytes)?;
                    from += piece as u64;
                }
            }
            Shape::Pixels(region, pixel) => {
                for rows in Self::rows(region, pixel) {
                    bytes.resize(rows.length, 0);
                    self.read_rows(&rows, &mut bytes)?;
                    to(rows.from, &bytes)?;
                }
            }
        }
        Ok(())
    }

    /// Writes a part of an object's bytes from an image.
    fn restore(&self, shape: Shape, part: &Bytes, contents: &Contents) -> Result<(), Immovable> {
        let length = shape.length();
        let end = part.from.checked_add(part.length);
        let is_part = match shape {
            Shape::Plain(_) => end.is_some() && end <= length,
            Shape::Pixels(..) => part.from == 0 && end == length,
        };
        if !is_part {
            return Err(Immovable::Wrong("contents of another size"));
        }
        let piece = |from: u64, bytes: &mut [u8]| {
            let start = part.at.checked_add(from - part.from);
            contents.read(start.ok_or(Immovable::Wrong("contents"))?, bytes)
        };
        match shape {
            Shape::Plain(_) => self.write_part(part.from, part.length, piece),
            Shape::Pixels(region, pixel) => self.write_pixels(region, pixel, piece),
        }
    }

    /// Writes bytes of a buffer, which come from `from`.
    fn write_part(
        &self,
        start: u64,
        length: u64,
        from: impl Fn(u64, &mut [u8]) -> Result<(), Immovable>,
    ) -> Result<(), Immovable> {
        let mut bytes = Vec::new();
        // Cannot overflow: it is a part of a buffer.
        let (mut at, end) = (start, start + length);
        while at < end {
            let piece = PIECE.min(end - at) as usize;
            bytes.resize(piece, 0);
            from(at, &mut bytes)?;
            self.write_bytes(at as usize, &bytes)?;
            at += piece as u64;
        }
        Ok(())
    }

    /// Writes all pixels of an image, which come from `from`.
    fn write_pixels(
        &self,
        region: [usize; 3],
        pixel: u64,
        from: impl Fn(u64, &mut [u8]) -> Result<(), Immovable>,
    ) -> Result<(), Immovable> {
        let mut bytes = Vec::new();
        for rows in Self::rows(region, pixel) {
            bytes.resize(rows.length, 0);
            from(rows.from, &mut bytes)?;
            self.write_rows(&rows, &bytes)?;
        }
        Ok(())
    }

    fn read_plain(&self, mem: Handle, from: usize, to: &mut [u8]) -> i32 {
        let (length, pointer) = (to.len(), to.as_mut_ptr().cast());
        cl!(
            self.api,
            clEnqueueReadBuffer(
                self.queue,
                mem,
                1,
                from,
                length,
                pointer,
                0,
                null(),
                null_mut()
            )
        )
    }

    fn read_bytes(&self, from: usize, to: &mut [u8]) -> Result<(), Immovable> {
        if self.read_plain(self.mem, from, to) == 0 {
            return Ok(());
        }
        let beside = self.beside(to.len())?;
        let copied = cl!(
            self.api,
            clEnqueueCopyBuffer(
                self.queue,
                self.mem,
                beside,
                from,
                0,
                to.len(),
                0,
                null(),
                null_mut()
            )
        );
        let code = if copied == 0 {
            self.read_plain(beside, 0, to)
        } else {
            copied
        };
        cl!(self.api, clReleaseMemObject(beside));
        check(code, "reading a buffer")
    }

    fn write_plain(&self, mem: Handle, at: usize, from: &[u8]) -> i32 {
        let (length, pointer) = (from.len(), from.as_ptr().cast());
        cl!(
            self.api,
            clEnqueueWriteBuffer(
                self.queue,
                mem,
                1,
                at,
                length,
                pointer,
                0,
                null(),
                null_mut()
            )
        )
    }

    fn write_bytes(&self, at: usize, from: &[u8]) -> Result<(), Immovable> {
        if self.write_plain(self.mem, at, from) == 0 {
            return Ok(());
        }
        let beside = self.beside(from.len())?;
        let code = match self.write_plain(beside, 0, from) {
            0 => cl!(
                self.api,
                clEnqueueCopyBuffer(
                    self.queue,
                    beside,
                    self.mem,
                    0,
                    at,
                    from.len(),
                    0,
                    null(),
                    null_mut()
                )
            ),
            code => code,
        };
        let finished = cl!(self.api, clFinish(self.queue));
        cl!(self.api, clReleaseMemObject(beside));
        check(if code == 0 { finished } else { code }, "writing a buffer")
    }

    fn read_rows(&self, rows: &Rows, to: &mut [u8]) -> Result<(), Immovable> {
        let (origin, region) = (rows.origin.as_ptr(), rows.region.as_ptr());
        let pointer = to.as_mut_ptr().cast();
        let code = cl!(
            self.api,
            clEnqueueReadImage(
                self.queue,
                self.mem,
                1,
                origin,
                region,
                0,
                0,
                pointer,
                0,
                null(),
                null_mut()
            )
        );
        if code == 0 {
            return Ok(());
        }
        let beside = self.beside(to.len())?;
        let copied = cl!(
            self.api,
            clEnqueueCopyImageToBuffer(
                self.queue,
                self.mem,
                beside,
                origin,
                region,
                0,
                0,
                null(),
                null_mut()
            )
        );
        let code = match copied {
            0 => self.read_plain(beside, 0, to),
            code => code,
        };
        cl!(self.api, clReleaseMemObject(beside));
        check(code, "reading an image")
    }

    fn write_rows(&self, rows: &Rows, from: &[u8]) -> Result<(), Immovable> {
        let (origin, region) = (rows.origin.as_ptr(), rows.region.as_ptr());
        let pointer = from.as_ptr().cast();
        let code = cl!(
            self.api,
            clEnqueueWriteImage(
                self.queue,
                self.mem,
                1,
                origin,
                region,
                0,
                0,
                pointer,
                0,
                null(),
                null_mut()
            )
        );
        if code == 0 {
            return Ok(());
        }
        let beside = self.beside(from.len())?;
        let code = match self.write_plain(beside, 0, from) {
            0 => cl!(
                self.api,
                clEnqueueCopyBufferToImage(
                    self.queue,
                    beside,
                    self.mem,
                    0,
                    origin,
                    region,
                    0,
                    null(),
                    null_mut()
                )
            ),
            code => code,
        };
        let finished = cl!(self.api, clFinish(self.queue));
        cl!(self.api, clReleaseMemObject(beside));
        check(if code == 0 { finished } else { code }, "writing an image")
    }

    /// Makes the driver write what the device holds of a part of a buffer to the window, where the buffer starts at
    /// `start`.
    fn sync(
        &self,
        server: &Server,
        (offset, length): (u64, u64),
        start: u64,
    ) -> Result<(), Immovable> {
        let mut code = 0;
        let pointer = cl!(
            self.api,
            clEnqueueMapBuffer(
                self.queue,
                self.mem,
                1,
                codes::MAP_READ,
                offset as usize,
                length as usize,
                0,
                null(),
                null_mut(),
                &raw mut code,
            )
        );
        if code == 0 {
            let code = cl!(
                self.api,
                clEnqueueUnmapMemObject(self.queue, self.mem, pointer, 0, null(), null_mut())
            );
            let finished = cl!(self.api, clFinish(self.queue));
            check(if code == 0 { finished } else { code }, "ending a mapping")?;
            return Ok(());
        }
        // The host may not read this buffer, so it is copied to its place in the window.
        let mut bytes = Vec::new();
        let mut from = offset;
        while from < offset + length {
            let piece = PIECE.min(offset + length - from);
            bytes.resize(piece as usize, 0);
            self.read_bytes(from as usize, &mut bytes)?;
            let to = server.window.at(start + from, piece);
            let to = to.ok_or(Immovable::Wrong("a buffer beyond the window"))?;
            // SAFETY: within the window, which stays mapped as long as the session. The client may write there, too, so
            // no reference to it is made.
            unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            from += piece;
        }
        Ok(())
    }
}

/// Some rows of an image.
#[derive(Debug)]
struct Rows {
    origin: [usize; 3],
    region: [usize; 3],
    /// Offset of the first byte in the image's bytes.
    from: u64,
    length: usize,
}

/// The gaps that these parts leave in this many bytes, as start and length.
fn outside(mut mapped: Vec<(u64, u64)>, size: u64) -> Vec<(u64, u64)> {
    mapped.sort_unstable();
    let (mut parts, mut at) = (Vec::new(), 0);
    for (offset, length) in mapped {
        if offset > at {
            parts.push((at, offset - at));
        }
        at = at.max(offset.saturating_add(length));
    }
    if at < size {
        parts.push((at, size - at));
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_between_mappings_are_found() {
        assert_eq!(outside(vec![], 100), [(0, 100)]);
        let mapped = vec![(50, 10), (0, 10), (5, 10)];
        assert_eq!(outside(mapped, 100), [(15, 35), (60, 40)]);
        assert_eq!(outside(vec![(0, 100)], 100), []);
    }

    #[test]
    fn an_image_is_cut_into_whole_rows() {
        let rows: Vec<_> = Transfer::rows([1 << 20, 3, 2], 4).collect();
        let lengths: Vec<_> = rows.iter().map(|rows| (rows.from, rows.length)).collect();
        let row = 4 << 20;
        let expected: Vec<_> = (0..6).map(|at| (at * row, row as usize)).collect();
        assert_eq!(lengths, expected);
        let rows: Vec<_> = Transfer::rows([16, 16, 2], 4).collect();
        assert_eq!(rows.len(), 2);
    }
}
