//! Objects that several clients have: shared by one program, duplicated by another, as CUDA IPC does.
//!
//! The driver takes the worker for the program of all clients. So who may duplicate an object is decided here: programs
//! of the user who shared it, and any program in its own clients.

use base::Unpoisoned;
use nvidia_abi::status;

use crate::{
    call::{Made, SHARE_NOBODY, SHARE_PROCESS, VIDEO},
    check::{Denied, put, word},
    objects::{Object, Pages},
    session::Session,
    sharing::Gated,
};

/// Memory that programs duplicate of each other: video memory, also as other GPUs of a fabric reach it.
const MEMORY: [u32; 2] = [VIDEO, 0xf8];
/// Where a share has its type and its action.
const TYPE: usize = 16;
const ACTION: usize = 18;
/// Types of shares: with everybody, and with programs of the same user.
const EVERYBODY: u16 = 1;
const USER: u16 = 2;
/// The action that takes a share back.
const REVOKE: u8 = 1;

impl Session {
    /// Shares an object with other clients, or takes that back.
    pub fn share_object(&mut self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let (client, handle) = (word(bytes, 0), word(bytes, 4));
        let wished = [bytes[TYPE], bytes[TYPE + 1]];
        let share_type = u16::from_le_bytes(wished);
        let is_revoked = bytes[ACTION] & REVOKE != 0;
        // For the driver all clients are this process's.
        if share_type != SHARE_NOBODY {
            put(bytes, TYPE, SHARE_PROCESS.to_le_bytes());
        }
        let result = self.issue(made, bytes);
        put(bytes, TYPE, wished);
        let result = result?;
        if Self::is_done(made, result, bytes) {
            let mut objects = self.worker().objects.lock_unpoisoned();
            let object = objects
                .client(client)
                .and_then(|client| client.object(handle));
            if let Some(object) = object {
                // A share with one client is with nobody here: that client may be any program's.
                object.is_shared = !is_revoked && [EVERYBODY, USER].contains(&share_type);
            }
        }
        Ok(result)
    }

    /// Duplicates an object of an own client, or memory of a GPU that a program of the same user shares.
    pub fn duplicate(&mut self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let [client, parent, _, source_client, source] =
            [0, 4, 8, 12, 16].map(|at| word(bytes, at));
        self.check_room(client)?;
        let mut objects = self.worker().objects.lock_unpoisoned();
        let of = objects
            .client(source_client)
            .ok_or(Denied::Status(status::INVALID_CLIENT))?;
        let (is_own, is_users) = (self.has(of.file), of.user == self.user());
        let object = of
            .object(source)
            .ok_or(Denied::Status(status::INVALID_OBJECT))?;
        let (class, size, charge) = (object.class, object.size, object.charge.clone());
        let may = is_own || (is_users && object.is_shared && MEMORY.contains(&class));
        let gated = self.worker().gated.is_some();
        if !may || (gated && !Gated::may_duplicate(class)) {
            return Err(Denied::Status(status::INSUFFICIENT_PERMISSIONS));
        }
        // Pages of the slice do not take its place any longer.
        object.is_fresh = false;
        // Those that are behind it are taken until the duplicate is gone, too.
        let pages = object.pages.as_ref().and_then(Pages::share);
        drop(objects);
        let result = self.issue(made, bytes);
        let is_done = matches!(&result, Ok(result) if Self::is_done(made, *result, bytes));
        if is_done {
            let duplicate = Object {
                parent,
                class,
                size,
                is_fresh: false,
                is_shared: false,
                pages,
                charge,
            };
            let mut objects = self.worker().objects.lock_unpoisoned();
            let gone = objects.add(client, word(bytes, 8), duplicate);
            drop(objects);
            gone.into_iter().for_each(Pages::release);
        } else if let Some(pages) = pages {
            pages.release();
        }
        result
    }
}
