//! The cover: the part of the window that is registered with the host's driver as host memory.
//!
//! Drivers copy unregistered memory slowly, through buffers of their own. A buffer with
//! `CL_MEM_USE_HOST_PTR` registers memory: NVIDIA's driver pins it, and from then on its DMA engine
//! serves every transfer whose pointer lies inside, in any context. A transfer that begins in one
//! such buffer and ends in the next takes the slow path, so transfers are split where two of them
//! meet.
//!
//! Registration takes time for every page and pins it in RAM. The cover therefore grows with use:
//! by as much as there was before, or up to the end of a larger range that is used at once.

use remoting_proto::apis::opencl::codes;
use remoting_transport::window::Window;

use super::driver::{
    api::{Api, Handle},
    cl,
};

/// Size of the first buffer in bytes. All sizes are multiples of it.
const GRAIN: u64 = 8 << 20;
/// Maximum growth ahead of use, in bytes.
const AHEAD: u64 = 256 << 20;

/// The cover of one platform: the ends of its buffers, relative to the start of the data.
#[derive(Clone, Debug, Default)]
struct Known {
    ends: Vec<u64>,
    /// Whether the driver has refused to register more.
    refused: bool,
}

impl Known {
    fn until(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Where the next buffer must end for use up to `end`.
    fn next(&self, end: u64) -> u64 {
        let until = self.until();
        // Cannot overflow: the window is mapped, so its size is far below the limit.
        (until + until.clamp(GRAIN, AHEAD)).max(end.next_multiple_of(GRAIN))
    }
}

/// The covers of all platforms.
#[derive(Debug)]
pub struct Cover(Vec<Known>);

impl Cover {
    /// An empty cover for this number of platforms.
    pub fn new(platforms: usize) -> Self {
        Self(vec![Known::default(); platforms])
    }

    /// Registers the window with a platform's driver up to the end of a range, which the caller has
    /// checked to lie in the window's data. Takes one comparison if it is registered already. The
    /// buffers hold the context in which they are created until the process ends.
    pub fn reach(
        &mut self,
        api: &Api,
        window: &Window,
        (platform, context): (usize, Handle),
        offset: u64,
        length: u64,
    ) {
        let Some(known) = self.0.get_mut(platform) else {
            return;
        };
        let end = (offset + length).saturating_sub(window.data());
        let until = known.until();
        if end <= until || known.refused {
            return;
        }
        let next = known.next(end).min(window.size() - window.data());
        let size = next - until;
        let Some(pointer) = window.at(window.data() + until, size) else {
            return;
        };
        let mut code = 0;
        let raw = cl!(
            api,
            clCreateBuffer(
                context,
                codes::MEM_USE_HOST_PTR,
                size as usize,
                pointer.cast(),
                &raw mut code,
            )
        );
        if raw == 0 {
            // Copies are slower from now on, but nothing else changes.
            known.refused = true;
            base::note!(
                "gantry-accel: the driver does not make more than {} MiB of the window its own \
                 (code {code}): copies beyond are slower",
                until >> 20
            );
        } else {
            known.ends.push(next);
        }
    }

    /// A range of the window's data, split where two buffers meet.
    pub fn parts(
        &self,
        window: &Window,
        platform: usize,
        offset: u64,
        length: u64,
    ) -> impl Iterator<Item = (u64, u64)> {
        let ends = self.0.get(platform).map_or(&[][..], |known| &known.ends);
        let start = window.data();
        let end = offset + length;
        let mut cuts = ends
            .iter()
            .map(move |cut| start + cut)
            .filter(move |cut| (offset + 1..end).contains(cut))
            .chain([end]);
        let mut at = offset;
        std::iter::from_fn(move || {
            let next = cuts.next()?;
            let part = (at, next - at);
            at = next;
            Some(part)
        })
    }
}

#[cfg(test)]
mod tests {
    use remoting_transport::{mapping, window::Window};

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_cover_doubles_and_reaches_what_is_used() {
        let mut known = Known::default();
        for end in [
            1,
            9 * MIB,
            17 * MIB,
            33 * MIB,
            200 * MIB,
            201 * MIB,
            420 * MIB,
        ] {
            known.ends.push(known.next(end));
        }
        let mib: Vec<_> = known.ends.iter().map(|end| end / MIB).collect();
        assert_eq!(mib, [8, 16, 32, 64, 200, 400, 656]);
    }

    #[test]
    fn a_transfer_is_cut_where_buffers_meet_and_nowhere_else() {
        let window = Window::map(&mapping::create(64 * MIB).unwrap(), 64 * MIB, 1 << 20).unwrap();
        let start = window.data();
        let cover = Cover(vec![Known {
            ends: vec![8 * MIB, 16 * MIB],
            refused: false,
        }]);
        let cut = |from: u64, length| -> Vec<_> {
            cover
                .parts(&window, 0, start + from, length)
                .map(|(at, length)| (at - start, length))
                .collect()
        };
        assert_eq!(cut(0, 8 * MIB), [(0, 8 * MIB)]);
        assert_eq!(
            cut(7 * MIB, 10 * MIB),
            [(7 * MIB, MIB), (8 * MIB, 8 * MIB), (16 * MIB, MIB)]
        );
        assert_eq!(cut(20 * MIB, 4096), [(20 * MIB, 4096)]);
    }
}
