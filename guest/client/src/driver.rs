//! What an API's driver provides.

use std::os::unix::net::UnixStream;

use remoting_proto::wire::{
    Api,
    messages::{Call, StageId},
};
use remoting_transport::order::Order;

use crate::{connection::Connection, link::Link};

/// The driver of one accelerator API. Everything is resolved at compile time: a call through the
/// core costs no more than one written for its API alone.
pub trait Driver: Sized + 'static {
    /// The driver's name, as it prefixes its messages.
    const NAME: &'static str;
    /// The API's name, as its users know it.
    const API: &'static str;
    /// The environment variable that contains the worker's address.
    const ADDRESS_VARIABLE: &'static str;
    /// The environment variable that sets how long a waiting call polls before it sleeps, in
    /// microseconds.
    const SPIN_VARIABLE: &'static str;
    /// The socket of the workers if the environment contains no address.
    const SOCKET: &'static str;

    /// The address of the window in this process, if its addresses have a meaning elsewhere. The
    /// window is placed elsewhere if that address is taken.
    const WINDOW_AT: Option<u64> = None;

    /// Whether the application's own allocations may be in the window (`libgantry_malloc.so`), where commands use them in
    /// place. Not where the API allows an application to use memory again before the command that copies it is over.
    const HEAP: bool = false;

    /// The schema of the API's requests. A stream needs it to know what a request does with the
    /// window.
    type Schema: Api;

    /// A status of the API (`cl_int`, `CUresult`), which is the error of a failed call and the
    /// argument of a callback. On the wire it is the number from which it is constructed here; 0
    /// means success.
    type Status: From<i32> + Copy + Send + 'static;
    /// A call cannot be executed because the worker has ended, cannot be reached, or has sent
    /// something that cannot be decoded.
    const WORKER_LOST: Self::Status;
    /// The window has no room for a call's data, now or ever.
    const WINDOW_FULL: Self::Status;
    /// This process was forked from one that uses the API ([`Connection::start`]).
    const FORKED: Self::Status;

    /// What the driver keeps with its connection, such as its objects' numbers.
    type State: Default + Send + Sync + 'static;

    /// This process's connection, in a static of the driver: a static cannot be generic over
    /// drivers.
    fn connection() -> &'static Connection<Self>;

    /// The call that waits until the worker has released a stage.
    fn await_stage(stage: StageId) -> impl Call<Answer = ()>;

    /// The window offset of these bytes of the application, if they are in the window at an address
    /// that is not the window's own. Called for each transfer.
    fn in_window(pointer: *const u8, length: u64) -> Option<u64> {
        let _ = (pointer, length);
        None
    }

    /// Moves this process to the worker named in the order, while it runs. The order arrived on
    /// `orders`. Called on the listener's thread. Returns the stream for further orders, if they do
    /// not come from the issuer of this one.
    ///
    /// # Errors
    /// The process stays where it is, for the reason returned.
    fn change_seat(
        link: &'static Link<Self>,
        order: &Order,
        orders: &UnixStream,
    ) -> Result<Option<UnixStream>, String> {
        let _ = (link, order, orders);
        Err(format!(
            "applications that call {} cannot be moved yet",
            Self::API
        ))
    }

    /// Called after a call has been sent, under the lock that serializes calls.
    fn sent(opcode: u16, body: &[u8]) {
        let _ = (opcode, body);
    }

    /// Handles an unsolicited message of the worker that the core does not know. Runs on the thread
    /// that has read it, with none of the core's locks held.
    fn message(link: &Link<Self>, opcode: u16, body: &[u8]) {
        let _ = (link, opcode, body);
    }

    /// Whether such messages may arrive: the listener then polls where no byte announces them.
    fn expects_messages(state: &Self::State) -> bool {
        let _ = state;
        false
    }
}
