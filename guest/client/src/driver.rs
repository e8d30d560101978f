//! What an API's driver says of itself.

use std::{os::unix::net::UnixStream, sync::OnceLock};

use gantry_remoting::{
    link::order::Order,
    wire::{
        Api,
        messages::{Call, StageId},
    },
};

use crate::link::Link;

/// The driver of one accelerator API. All of it is resolved when the driver is compiled: a call
/// through the core costs no more than one written for its API alone.
pub trait Driver: Sized + 'static {
    /// The driver, as its messages begin.
    const NAME: &'static str;
    /// The API, as its users call it.
    const API: &'static str;
    /// The environment variable that names the worker's address.
    const ADDRESS_VARIABLE: &'static str;
    /// The environment variable that says for how many microseconds a waiting call polls before it
    /// sleeps.
    const SPIN_VARIABLE: &'static str;
    /// The socket where workers are found if the environment names no address.
    const SOCKET: &'static str;

    /// Where the window is to be in this process, if its addresses have a meaning elsewhere. It is
    /// somewhere else where that place is taken.
    const WINDOW_AT: Option<u64> = None;

    /// The schema of its requests: a stream asks it what a request does with the window.
    type Schema: Api;

    /// A status of the API (`cl_int`, `CUresult`): what a call fails with, and what a callback is
    /// told. On the wire it is the number from which it is made here; 0 there is success.
    type Status: From<i32> + Copy + Send + 'static;
    /// A call cannot be carried out because the worker has ended, cannot be reached, or has sent
    /// what cannot be decoded.
    const WORKER_LOST: Self::Status;
    /// The window has no room for a call's data, now or ever.
    const WINDOW_FULL: Self::Status;

    /// What the driver keeps with its connection, such as the numbers of its objects.
    type State: Default + Send + Sync + 'static;

    /// Where this process's connection is kept: a static of the driver, as one generic over drivers
    /// cannot be.
    fn connection() -> &'static Connection<Self>;

    /// The call that waits until the worker has released a stage.
    fn await_stage(stage: StageId) -> impl Call<Answer = ()>;

    /// Where in the window these bytes of the application are, if they are there under an address
    /// that is not the window's own. Asked for each transfer.
    fn in_window(pointer: *const u8, length: u64) -> Option<u64> {
        let _ = (pointer, length);
        None
    }

    /// Has this process be served where an order says from now on, while it runs; it has come by `orders`. On
    /// the listener's thread. Where further orders come from, if not from who has given this one.
    ///
    /// # Errors
    /// It stays where it is; why.
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

    /// A call has been sent. Under the lock under which calls are.
    fn sent(opcode: u16, body: &[u8]) {
        let _ = (opcode, body);
    }

    /// Handles an unsolicited message of the worker that the core does not know. Runs on whichever
    /// thread has read it; none of the core's locks is held.
    fn message(link: &Link<Self>, opcode: u16, body: &[u8]) {
        let _ = (link, opcode, body);
    }

    /// Whether such messages may come: where no byte announces them, the listener then polls.
    fn expects_messages(state: &Self::State) -> bool {
        let _ = state;
        false
    }
}

/// A process's connection: not tried yet, failed, or there until the process ends.
pub type Connection<D> = OnceLock<Option<Link<D>>>;
