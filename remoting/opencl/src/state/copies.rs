//! Copies the contents of buffers and images to image files, once or repeatedly. Repeated copies include only objects
//! that commands [may have written](super::super::written) since, and of buffers only blocks that have changed. Nothing
//! is copied of a buffer that nobody [has written](super::super::touched) since it was made.
//!
//! Changes are detected by hashes, which the device computes of a private copy: the hash therefore matches the bytes
//! that are sent, whatever the application's kernels do to the buffer meanwhile. If the device's compiler cannot build
//! the kernel for this, a changed buffer is copied as a whole, as an image is. So is a buffer of a single block, for
//! which nothing is compiled.

use std::{
    collections::HashMap,
    ffi::c_void,
    hash::{BuildHasher, Hasher, RandomState},
    ptr::{null, null_mut},
    sync::Arc,
};

use remoting_session::image::{Immovable, Writer};

use super::{
    Bytes,
    contents::{Root, check},
};
use crate::{
    driver::{
        api::{Api, Handle},
        cl,
    },
    objects::made,
    touched::BLOCK,
    written::Written,
};

/// Bytes copied aside at a time: a multiple of [`BLOCK`].
const ASIDE: u64 = 16 << 20;
/// Work-items that hash a block.
const ITEMS: usize = 256;
/// Hashes one block per work-group: each item takes every 256th word, and the items' results are combined pairwise.
/// Every step is a bijection of each half of the result, both for a given word and for a given result, so that a change
/// of a single word is always detected.
const SOURCE: &std::ffi::CStr = c"
#define MIX(h, w) (rotate((h) ^ (w) * 0x9e3779b97f4a7c15UL, 29UL) * 0xbf58476d1ce4e5b9UL)
kernel __attribute__((reqd_work_group_size(256, 1, 1)))
void gantry_hash(global const ulong *words, global ulong2 *hashes, ulong bytes, ulong2 key) {
    local ulong2 parts[256];
    size_t item = get_local_id(0);
    size_t word = get_group_id(0) * 8192 + item;
    ulong2 hash = key + (ulong2)(item, item << 32);
    for (int step = 0; step < 32; step++, word += 256) {
        ulong value = 0;
        if ((word + 1) * 8 <= bytes) {
            value = words[word];
        } else {
            for (ulong at = word * 8; at < bytes; at++)
                value = value << 8 | ((global const uchar *)words)[at];
        }
        hash.x = MIX(hash.x, value);
        hash.y = MIX(hash.y + hash.x, value);
    }
    parts[item] = hash;
    for (size_t count = 128; count; count /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (item < count) {
            parts[item].x = MIX(parts[item].x, parts[item + count].x);
            parts[item].y = MIX(parts[item].y, parts[item + count].y);
        }
    }
    if (item == 0) hashes[get_group_id(0)] = parts[0];
}";

/// A block's hash.
type Hash = [u64; 2];

/// The state for copies in each context, and what has been copied.
#[derive(Debug, Default)]
pub(super) struct Copies {
    contexts: HashMap<Handle, Copier>,
    /// The hashes of the blocks that were copied last, by the object's number in the log: none for blocks without
    /// contents, for images, or where no hashes are computed.
    known: HashMap<u32, Vec<Option<Hash>>>,
    /// What commands may have written after it had been copied.
    pub late: Written,
    /// The key of the hashes; `None` if nothing is copied twice.
    key: Option<Hash>,
}

impl Copies {
    /// For contents that are copied more than once.
    pub fn repeated() -> Self {
        // Random, like the keys of the standard library.
        let word = || RandomState::new().build_hasher().finish();
        Self {
            key: Some([word(), word()]),
            ..Self::default()
        }
    }

    /// Copies to the image what has changed since the last time.
    pub fn save(
        &mut self,
        api: &Arc<Api>,
        roots: &[Root],
        image: &mut Writer,
    ) -> Result<Vec<Bytes>, Immovable> {
        let mut saved = Vec::new();
        for root in roots {
            if !self.is_due(root) {
                continue;
            }
            if root.parts.is_empty() {
                self.known.entry(root.number).or_default();
                continue;
            }
            if !self.contexts.contains_key(&root.context) {
                let copier = Copier::new(api, root, self.key)?;
                self.contexts.insert(root.context, copier);
            }
            let Some(copier) = self.contexts.get_mut(&root.context) else {
                continue;
            };
            let queue = copier.queue;
            match copier.hasher(root) {
                Some(hasher) => {
                    let known = self.known.entry(root.number).or_default();
                    hasher.save(queue, root, known, image, &mut saved)?;
                }
                None => {
                    for part in &root.parts {
                        let (from, length) = (part.start, part.end - part.start);
                        let at = image.reserve(length)?;
                        root.read(api, queue, part, |next, bytes| {
                            image.write(at + (next - from), bytes)
                        })?;
                        saved.push(Bytes {
                            mem: root.number,
                            from,
                            at,
                            length,
                        });
                    }
                    self.known.insert(root.number, Vec::new());
                }
            }
        }
        Ok(saved)
    }

    /// Whether an object's bytes may differ from the last copy.
    pub fn is_due(&self, root: &Root) -> bool {
        root.is_written || !self.known.contains_key(&root.number)
    }

    /// Forgets buffers and images that no longer exist.
    pub fn forget(&mut self, numbers: &[u32]) {
        for number in numbers {
            self.known.remove(number);
        }
    }
}

/// A queue for copies in a context, which it keeps alive.
#[derive(Debug)]
pub(super) struct Copier {
    api: Arc<Api>,
    context: Handle,
    device: Handle,
    pub queue: Handle,
    /// The key for the hashing kernel, until that is created.
    key: Option<Hash>,
    hashing: Option<Hashing>,
}

impl Copier {
    pub fn new(api: &Arc<Api>, root: &Root, key: Option<Hash>) -> Result<Self, Immovable> {
        let (context, device) = (root.context, root.device);
        let mut code = 0;
        let queue = cl!(api, clCreateCommandQueue(context, device, 0, &raw mut code));
        let queue = made(queue, code).map_err(|code| Immovable::Refused {
            what: "a queue for copies".to_owned(),
            code,
        })?;
        cl!(api, clRetainContext(context));
        Ok(Self {
            api: Arc::clone(api),
            context,
            device,
            queue,
            key,
            hashing: None,
        })
    }

    /// The hashing kernel for an object's blocks. It is created for the first object with several blocks, if the driver
    /// can.
    fn hasher(&mut self, root: &Root) -> Option<&Hashing> {
        if !root.is_plain() || root.length <= BLOCK {
            return None;
        }
        if let Some(key) = self.key.take() {
            let made = Hashing::new(&self.api, self.context, self.device, key);
            let made = made.inspect_err(|code| {
                base::note!(
                    "gantry-accel: the driver makes no hashes of buffers (code {code}): all of their \
                     contents are copied while an application that moves stands still"
                );
            });
            self.hashing = made.ok();
        }
        self.hashing.as_ref()
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        drop(self.hashing.take());
        cl!(self.api, clReleaseCommandQueue(self.queue));
        cl!(self.api, clReleaseContext(self.context));
    }
}

/// Hashes blocks in a context.
#[derive(Debug)]
struct Hashing {
    api: Arc<Api>,
    program: Handle,
    kernel: Handle,
    /// The buffer to which blocks are copied.
    aside: Handle,
    /// The buffer to which the device writes hashes.
    hashes: Handle,
    key: Hash,
}

impl Hashing {
    /// Fails with the code of the call that failed.
    fn new(api: &Arc<Api>, context: Handle, device: Handle, key: Hash) -> Result<Self, i32> {
        // Zero is no handle: what has not been created is not released.
        let mut hashing = Self {
            api: Arc::clone(api),
            program: 0,
            kernel: 0,
            aside: 0,
            hashes: 0,
            key,
        };
        let (mut code, source) = (0, SOURCE.as_ptr());
        let (program, no_lengths) = (&raw mut code, null());
        let program = cl!(
            api,
            clCreateProgramWithSource(context, 1, &raw const source, no_lengths, program)
        );
        hashing.program = made(program, code)?;
        let options = c"".as_ptr();
        let built = cl!(
            api,
            clBuildProgram(
                hashing.program,
                1,
                &raw const device,
                options,
                None,
                null_mut()
            )
        );
        super::super::driver::outcome(built)?;
        let name = c"gantry_hash".as_ptr();
        let kernel = cl!(api, clCreateKernel(hashing.program, name, &raw mut code));
        hashing.kernel = made(kernel, code)?;
        hashing.set(3, &hashing.key)?;
        let buffer = |size: u64| {
            let mut code = 0;
            let raw = cl!(
                api,
                clCreateBuffer(context, 0, size as usize, null_mut(), &raw mut code)
            );
            made(raw, code)
        };
        hashing.aside = buffer(ASIDE)?;
        hashing.hashes = buffer(ASIDE / BLOCK * size_of::<Hash>() as u64)?;
        hashing.set(0, &hashing.aside)?;
        hashing.set(1, &hashing.hashes)?;
        Ok(hashing)
    }

    fn set<T>(&self, index: u32, value: &T) -> Result<(), i32> {
        let value: *const c_void = std::ptr::from_ref(value).cast();
        let (kernel, size) = (self.kernel, size_of::<T>());
        super::super::driver::outcome(cl!(self.api, clSetKernelArg(kernel, index, size, value)))
    }

    /// Copies to the image the blocks of a buffer whose hashes differ from the known ones.
    fn save(
        &self,
        queue: Handle,
        root: &Root,
        known: &mut Vec<Option<Hash>>,
        image: &mut Writer,
        saved: &mut Vec<Bytes>,
    ) -> Result<(), Immovable> {
        // A buffer's length does not change.
        known.resize(root.length.div_ceil(BLOCK) as usize, None);
        let pieces = root.parts.iter().flat_map(|part| {
            let starts = part.clone().step_by(ASIDE as usize);
            starts.map(|from| from..part.end.min(from.saturating_add(ASIDE)))
        });
        let mut bytes = Vec::new();
        for piece in pieces {
            let (from, length) = (piece.start, piece.end - piece.start);
            let hashes = self.hash(queue, root, from, length)?;
            // Parts start at block boundaries.
            let known = known.get_mut((from / BLOCK) as usize..).unwrap_or_default();
            for run in changed(&hashes, known) {
                let start = run.start as u64 * BLOCK;
                let part = (run.end as u64 * BLOCK).min(length) - start;
                bytes.resize(part as usize, 0);
                self.read(queue, self.aside, start, &mut bytes)?;
                let at = image.reserve(part)?;
                image.write(at, &bytes)?;
                saved.push(Bytes {
                    mem: root.number,
                    from: from + start,
                    at,
                    length: part,
                });
            }
            for (known, hash) in known.iter_mut().zip(hashes) {
                *known = Some(hash);
            }
        }
        Ok(())
    }

    /// Copies a part of a buffer aside, and returns the hashes of its blocks.
    fn hash(
        &self,
        queue: Handle,
        root: &Root,
        from: u64,
        length: u64,
    ) -> Result<Vec<Hash>, Immovable> {
        let copied = cl!(
            self.api,
            clEnqueueCopyBuffer(
                queue,
                root.mem,
                self.aside,
                from as usize,
                0,
                length as usize,
                0,
                null(),
                null_mut()
            )
        );
        check(copied, "copying a buffer")?;
        let set = self.set(2, &length);
        check(set.err().unwrap_or(0), "hashing a buffer")?;
        let blocks = length.div_ceil(BLOCK) as usize;
        let (all, group) = (blocks * ITEMS, ITEMS);
        let enqueued = cl!(
            self.api,
            clEnqueueNDRangeKernel(
                queue,
                self.kernel,
                1,
                null(),
                &raw const all,
                &raw const group,
                0,
                null(),
                null_mut()
            )
        );
        check(enqueued, "hashing a buffer")?;
        let mut bytes = vec![0; blocks * size_of::<Hash>()];
        self.read(queue, self.hashes, 0, &mut bytes)?;
        let words: Vec<_> = bytes
            .as_chunks()
            .0
            .iter()
            .map(|word| u64::from_ne_bytes(*word))
            .collect();
        Ok(words.as_chunks().0.to_vec())
    }

    fn read(
        &self,
        queue: Handle,
        buffer: Handle,
        from: u64,
        to: &mut [u8],
    ) -> Result<(), Immovable> {
        let (length, pointer) = (to.len(), to.as_mut_ptr().cast());
        let code = cl!(
            self.api,
            clEnqueueReadBuffer(
                queue,
                buffer,
                1,
                from as usize,
                length,
                pointer,
                0,
                null(),
                null_mut()
            )
        );
        check(code, "reading a buffer")
    }
}

impl Drop for Hashing {
    fn drop(&mut self) {
        for buffer in [self.hashes, self.aside] {
            if buffer != 0 {
                cl!(self.api, clReleaseMemObject(buffer));
            }
        }
        if self.kernel != 0 {
            cl!(self.api, clReleaseKernel(self.kernel));
        }
        if self.program != 0 {
            cl!(self.api, clReleaseProgram(self.program));
        }
    }
}

/// Runs of blocks whose hashes differ from the known ones.
fn changed(now: &[Hash], known: &[Option<Hash>]) -> Vec<std::ops::Range<usize>> {
    let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
    for (at, hash) in now.iter().enumerate() {
        if known.get(at) == Some(&Some(*hash)) {
            continue;
        }
        match runs.last_mut() {
            Some(run) if run.end == at => run.end += 1,
            _ => runs.push(at..at + 1),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_blocks_that_have_changed_are_found() {
        let hash = |number: u64| [number, 0];
        let now = [hash(1), hash(2), hash(3), hash(4), hash(5)];
        assert_eq!(changed(&now, &now.map(Some)), []);
        let all: Vec<_> = changed(&now, &[]).into_iter().flatten().collect();
        assert_eq!(all, [0, 1, 2, 3, 4]);
        let known = [Some(hash(1)), None, Some(hash(9)), Some(hash(4))];
        assert_eq!(changed(&now, &known), [1..3, 4..5]);
    }
}
