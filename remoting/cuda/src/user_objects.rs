//! User objects: values that the client makes graphs retain, with a client function to call when nobody holds the
//! object any more.
//!
//! A graph that retains one holds one reference to a user object of the driver. The driver knows which clones and
//! executable graphs share it, and which of their launches still run. The client's own references are counted here. So
//! are those of each graph that the client names, so that a graph releases no more than it holds.

use std::{
    collections::HashMap,
    ffi::c_void,
    ptr::null_mut,
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

use cuda_definition::driver::types::{CUgraph, CUuserObject};
use remoting_proto::apis::cuda::{
    Kind,
    calls::{CreateUserObject, ReleaseUserObject, RetainUserObject},
    codes,
};
use remoting_session::notice::{Board, Notice};

use super::{
    Server,
    driver::{Api, cu, outcome},
    host_functions::News,
};

/// Maximum number of user objects, and of user objects retained by graphs.
const MOST: usize = 64 << 10;
/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`
const NO_SYNC: u32 = 1;
/// `CU_GRAPH_USER_OBJECT_MOVE`
const MOVE: u32 = 1;

/// A user object while anybody holds it. Its end is reported to the client, on whichever thread it happens.
#[derive(Debug)]
struct Shared {
    board: Arc<Board<News>>,
    all: Arc<AtomicUsize>,
    number: u64,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.all.fetch_sub(1, Ordering::AcqRel);
        self.board.leave(Notice::Backend(News::Gone(self.number)));
    }
}

/// What the driver holds for graphs.
struct Kept {
    _shared: Arc<Shared>,
    all: Arc<AtomicUsize>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.all.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Called by the driver when no graph holds the value any more.
unsafe extern "C" fn gone<T>(data: *mut c_void) {
    // SAFETY: made by `keep`; the driver calls this once and does not use the data afterwards.
    drop(unsafe { Box::from_raw(data.cast::<T>()) });
}

/// Makes a graph hold a value, by a user object of the driver to which the graph has the only reference. Returns that
/// object and the value's address. If this fails, the value is dropped.
pub(super) fn keep<T>(
    api: &Api,
    graph: CUgraph,
    value: Box<T>,
) -> Result<(CUuserObject, *mut c_void), i32> {
    let (data, mut object) = (Box::into_raw(value).cast::<c_void>(), null_mut());
    let made = cu!(
        api,
        cuUserObjectCreate(&raw mut object, data, Some(gone::<T>), 1, NO_SYNC)
    );
    if made != 0 {
        // SAFETY: the driver has refused the data, so nobody else holds it.
        unsafe { gone::<T>(data) };
        return Err(made);
    }
    let retained = cu!(api, cuGraphRetainUserObject(graph, object, 1, MOVE));
    if retained != 0 {
        cu!(api, cuUserObjectRelease(object, 1));
    }
    outcome(retained).map(|()| (object, data))
}

/// A user object that a graph retains.
#[derive(Debug)]
pub(super) struct Retained {
    /// The client's number of the user object.
    number: u64,
    count: u32,
    /// The driver's user object, to which the graph has one reference.
    raw: usize,
}

/// A user object of the client.
#[derive(Debug)]
struct UserObject {
    shared: Weak<Shared>,
    /// The client's own references, if any.
    own: Option<(Arc<Shared>, u32)>,
}

/// All user objects, by the client's numbers.
#[derive(Debug, Default)]
pub(super) struct UserObjects {
    by_number: HashMap<u64, UserObject>,
    all: Arc<AtomicUsize>,
}

/// Checks a reference count against the API's limit.
fn counted(count: u32) -> Result<u32, i32> {
    match count {
        1..=0x7fff_ffff => Ok(count),
        _ => Err(codes::INVALID_VALUE),
    }
}

impl UserObjects {
    /// Forgets a user object that has ended.
    pub(super) fn forget(&mut self, number: u64) {
        self.by_number.remove(&number);
    }

    /// Checks that there is room for one more, and counts it.
    fn count_one(&self) -> Result<Arc<AtomicUsize>, i32> {
        if self.all.load(Ordering::Acquire) >= MOST {
            return Err(codes::OUT_OF_MEMORY);
        }
        self.all.fetch_add(1, Ordering::AcqRel);
        Ok(Arc::clone(&self.all))
    }

    fn get(&self, number: u64) -> Result<&UserObject, i32> {
        self.by_number.get(&number).ok_or(codes::INVALID_VALUE)
    }

    /// Looks up a user object that is still held.
    fn shared(&self, number: u64) -> Result<Arc<Shared>, i32> {
        let shared = self.get(number)?.shared.upgrade();
        shared.ok_or(codes::INVALID_VALUE)
    }

    /// Checks that the client holds at least this many references.
    fn check_own(&self, number: u64, count: u32) -> Result<(), i32> {
        match &self.get(number)?.own {
            Some((_, own)) if *own >= count => Ok(()),
            _ => Err(codes::INVALID_VALUE),
        }
    }

    /// Adds to the client's references.
    fn add_own(&mut self, number: u64, count: u32) -> Result<(), i32> {
        let shared = self.shared(number)?;
        let object = self.by_number.get_mut(&number);
        let own = &mut object.ok_or(codes::INVALID_VALUE)?.own;
        let before = own.as_ref().map_or(0, |(_, count)| *count);
        // Cannot overflow: both are at most half of what a u32 holds.
        *own = Some((shared, counted(before + count)?));
        Ok(())
    }

    /// Subtracts from the client's references.
    fn drop_own(&mut self, number: u64, count: u32) -> Result<(), i32> {
        self.check_own(number, count)?;
        if let Some(object) = self.by_number.get_mut(&number)
            && let Some((_, own)) = &mut object.own
        {
            *own -= count;
            if *own == 0 {
                object.own = None;
            }
        }
        Ok(())
    }
}

impl Server {
    pub(super) fn create_user_object(&mut self, call: &CreateUserObject) -> Result<(), i32> {
        let count = counted(call.count)?;
        let objects = &mut self.session.backend.user_objects;
        if objects.by_number.contains_key(&call.number) {
            return Err(codes::INVALID_VALUE);
        }
        let shared = Arc::new(Shared {
            board: Arc::clone(&self.session.board),
            all: objects.count_one()?,
            number: call.number,
        });
        let object = UserObject {
            shared: Arc::downgrade(&shared),
            own: Some((shared, count)),
        };
        objects.by_number.insert(call.number, object);
        Ok(())
    }

    pub(super) fn retain_user_object(&mut self, call: &RetainUserObject) -> Result<(), i32> {
        let count = counted(call.count)?;
        if call.graph == 0 {
            return self.backend.user_objects.add_own(call.number, count);
        }
        if call.moves {
            self.backend.user_objects.check_own(call.number, count)?;
        }
        let shared = self.backend.user_objects.shared(call.number)?;
        let graph = self
            .session
            .backend
            .objects
            .get_mut(Kind::Graph, call.graph)?;
        let mut known = graph.retained.iter_mut();
        match known.find(|one| one.number == call.number) {
            // Cannot overflow: both are at most half of what a u32 holds.
            Some(known) => known.count = counted(known.count + count)?,
            None => {
                let kept = Box::new(Kept {
                    _shared: shared,
                    all: self.session.backend.user_objects.count_one()?,
                });
                let (raw, _) = keep(&self.session.backend.api, graph.raw as CUgraph, kept)?;
                graph.retained.push(Retained {
                    number: call.number,
                    count,
                    raw: raw as usize,
                });
            }
        }
        match call.moves {
            true => self.backend.user_objects.drop_own(call.number, count),
            false => Ok(()),
        }
    }

    pub(super) fn release_user_object(&mut self, call: &ReleaseUserObject) -> Result<(), i32> {
        let count = counted(call.count)?;
        if call.graph == 0 {
            return self.backend.user_objects.drop_own(call.number, count);
        }
        let graph = self.backend.objects.get_mut(Kind::Graph, call.graph)?;
        let mut known = graph.retained.iter();
        let place = known.position(|one| one.number == call.number && one.count >= count);
        let place = place.ok_or(codes::INVALID_VALUE)?;
        graph.retained[place].count -= count;
        if graph.retained[place].count > 0 {
            return Ok(());
        }
        let raw = graph.retained.swap_remove(place).raw as CUuserObject;
        let graph = graph.raw as CUgraph;
        outcome(cu!(
            self.backend.api,
            cuGraphReleaseUserObject(graph, raw, 1)
        ))
    }
}
