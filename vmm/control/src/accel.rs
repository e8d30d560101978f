//! Moves accelerators' applications to other workers while the guest runs.
//!
//! A move has a thread of its own, which reports the result to the control thread. The client waits for its reply until
//! then; other requests are served meanwhile.

use std::{
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use base::{Cancel, gpus::Selection};
use devices::accel::{
    LONGEST_NAME, Pool,
    moving::{Address, Answer, Move, Moved, OutcomeKind, Seat, Seated, Unknown},
};
use vmm_api::{AccelSeat, ApiError, MovedAccel, Reply, Response, Status, VmMoveAccel};
use vmm_config::{AccelConfig, AccelVia, HasCommonConfig, RingConfig, VmConfig};
use vmm_machine::{events::MachineEvent, kinds::Handle};

use super::{Control, life::Life, migration::OVER};

/// How long a guest's agent may take to switch its applications to another server: each application copies its state.
pub(super) const SEATED: Duration = Duration::from_secs(660);

/// A move of an accelerator's applications to other workers.
pub(super) struct Moving {
    /// Number of the move: the end of a move of a previous machine must not be taken for the end of this one.
    pub(super) number: u64,
    /// The reply to the client that requested the move.
    pub(super) reply: Reply,
    /// Cancels the move.
    pub(super) cancel: Cancel,
    /// Set when all applications have moved, so that there is nothing left to cancel.
    pub(super) all_gone: Arc<AtomicBool>,
}

impl Moving {
    /// Whether all applications have moved, and only contents of their memory still follow.
    pub(super) fn has_gone(&self) -> bool {
        self.all_gone.load(Ordering::SeqCst)
    }
}

/// Refuses a selection of devices that is wrong for every host, or longer than workers are told.
pub(super) fn check_selection(devices: Option<&str>) -> Result<(), ApiError> {
    let Some(devices) = devices else {
        return Ok(());
    };
    let why = match devices.parse::<Selection>() {
        Err(error) => error.to_string(),
        Ok(_) if devices.len() > LONGEST_NAME => format!("use at most {LONGEST_NAME} bytes"),
        Ok(_) => return Ok(()),
    };
    let message = format!("device: {why}");
    Err(ApiError::message(Status::BadRequest, message))
}

impl Control {
    /// `vm.move-accel`: replies when every application has moved or failed to.
    pub(super) fn move_accel(&mut self, request: VmMoveAccel, reply: Reply) {
        let id = request.id.clone();
        match self.start_move(request) {
            Ok((number, cancel, all_gone)) => {
                let moving = Moving {
                    number,
                    reply,
                    cancel,
                    all_gone,
                };
                self.moves.insert(id, moving);
            }
            Err(error) => reply.send(Err(error)),
        }
    }

    /// Abandons all moves, because the machine is gone or replaced.
    pub(super) fn abandon_moves(&mut self) {
        for moving in mem::take(&mut self.moves).into_values() {
            moving.cancel.cancel();
            moving.reply.send(Err(ApiError::wrong_state(OVER)));
        }
    }

    fn start_move(
        &mut self,
        request: VmMoveAccel,
    ) -> Result<(u64, Cancel, Arc<AtomicBool>), ApiError> {
        let to = seat(&request)?;
        let id = request.id;
        if self.moves.contains_key(&id) {
            let message = format!("applications of {id:?} are being moved already");
            return Err(ApiError::message(Status::Conflict, message));
        }
        let Life::Live {
            machine, config, ..
        } = &mut self.life
        else {
            return Err(self.not_live());
        };
        let Some(plugged) = machine.devices().get(&id) else {
            let message = format!("there is no device {id:?}");
            return Err(ApiError::message(Status::NotFound, message));
        };
        let (Handle::Accel(port), Some(ring)) = (&plugged.handle, ring(config, &id)) else {
            let message =
                format!("{id:?} is no accelerator that is served by a pool of worker processes");
            return Err(ApiError::message(Status::BadRequest, message));
        };
        if port.is_native() && !matches!(to, Some(Seat::Host | Seat::Parked(None))) {
            let message = format!(
                "{id:?} is for native contexts, whose programs stay with its worker: they can be suspended in the guest's \
                 memory (seat=Parked) and resumed (seat=Host)"
            );
            return Err(ApiError::message(Status::BadRequest, message));
        }
        let number = self.migrations.number();
        let sender = self.sender.clone();
        let no_thread = |error: std::io::Error| {
            ApiError::internal(&error).context("cannot start a thread that moves applications")
        };
        if let Some(by) = to {
            let names_more = request.slice.is_some()
                || request.socket.is_some()
                || request.device.is_some()
                || request.postcopy;
            if names_more {
                let message =
                    "seat and address are for all applications of the guest, and named alone";
                return Err(ApiError::message(Status::BadRequest, message));
            }
            // Return moves planned after a failed migration are superseded by this request.
            self.migrations.returns.retain(|it| !it.is_by(&id));
            let told = move |seated| sender.send(MachineEvent::AccelSeated { id, number, seated });
            let cancel = Cancel::default();
            let started = port.start_seats(by, SEATED, cancel.clone(), told);
            return started
                .map(|()| (number, cancel, Arc::default()))
                .map_err(no_thread);
        }
        if let Some(slice) = request.slice.filter(|slice| *slice >= ring.slices) {
            let message = format!("{id:?} has no slice {slice}, but {}", ring.slices);
            return Err(ApiError::message(Status::BadRequest, message));
        }
        check_selection(request.device.as_deref())?;
        let now = port.pool();
        let asked = Move {
            slice: request.slice,
            to: Pool {
                socket: request.socket.unwrap_or(now.socket),
                device: request.device.unwrap_or(now.device),
            },
            drain: Duration::from_millis(request.drain_ms),
            postcopy: request.postcopy,
            cancel: Cancel::default(),
            all_gone: Arc::default(),
        };
        let (cancel, all_gone) = (asked.cancel.clone(), Arc::clone(&asked.all_gone));
        let told = move |moved| sender.send(MachineEvent::AccelMoved { id, number, moved });
        port.start(asked, told).map_err(no_thread)?;
        Ok((number, cancel, all_gone))
    }

    /// Refuses operations that need all applications in place, until no move is in progress.
    pub(super) fn refuse_if_moving(&self) -> Result<(), ApiError> {
        let ids: Vec<_> = self.moves.keys().map(|id| format!("{id:?}")).collect();
        if ids.is_empty() {
            return Ok(());
        }
        let ids = ids.join(", ");
        let message = format!(
            "applications of {ids} change their workers (vm.move-accel): wait for the answer, or end \
             that by vm.cancel-migration"
        );
        Err(ApiError::message(Status::Conflict, message))
    }

    /// Handles the result of a request to the guest's agent to change which side serves its applications.
    pub(super) fn accel_seated(&mut self, id: &str, number: u64, seated: Seated) {
        let moving = self.moves.get(id);
        if moving.is_none_or(|moving| moving.number != number) {
            return;
        }
        let Some(Moving { reply, .. }) = self.moves.remove(id) else {
            return;
        };
        reply.send(match applications_served(&seated.by, seated.outcome) {
            Ok(count) => {
                self.tell_accel_moved(id, count, &seated.by);
                Ok(Response::MovedAccel(MovedAccel {
                    slices: Vec::new(),
                    applications: Some(count),
                }))
            }
            Err(why) => Err(ApiError::message(Status::Internal, why)),
        });
    }

    /// Reports that all applications of the guest are now served by `by`, and that `count` of them have moved.
    pub(super) fn tell_accel_moved(&mut self, id: &str, count: u16, by: &Seat) {
        match by {
            Seat::Parked(_) => log::info!("{id:?}: {count} applications are parked in {by}"),
            _ => log::info!("{id:?}: applications are served by {by} now; {count} have moved"),
        }
        let (moved, by) = (count.to_string(), by.to_string());
        let properties = [("id", id), ("applications", &moved), ("by", &by)];
        self.monitor.emit("vm", "accel-moved", &properties);
    }

    /// Handles the end of a move.
    pub(super) fn accel_moved(&mut self, id: &str, number: u64, moved: Moved) {
        if self
            .moves
            .get(id)
            .is_none_or(|moving| moving.number != number)
        {
            return;
        }
        let Moved {
            asked,
            slices,
            reasons,
        } = moved;
        let stays = slices.is_empty() && !reasons.is_empty();
        if asked.slice.is_none()
            && !stays
            && let Life::Live { config, .. } = &mut self.life
            && let Some(ring) = ring(config, id)
        {
            ring.socket.clone_from(&asked.to.socket);
            ring.device = Some(asked.to.device.clone()).filter(|device| !device.is_empty());
        }
        let socket = asked.to.socket.display().to_string();
        for slice in &slices {
            log::info!("the application of slice {slice} of {id:?} is served by {socket} now");
            let slice = slice.to_string();
            let properties = [("id", id), ("slice", &slice), ("socket", &socket)];
            self.monitor.emit("vm", "accel-moved", &properties);
        }
        for reason in &reasons {
            log::warn!("{id:?}: {reason}");
        }
        let Some(Moving { reply, .. }) = self.moves.remove(id) else {
            return;
        };
        reply.send(match reasons.is_empty() {
            true => Ok(Response::MovedAccel(MovedAccel {
                slices,
                applications: None,
            })),
            false => {
                let moved = match slices.len() {
                    0 => "no application has moved".to_owned(),
                    count => format!("{count} of the applications have moved"),
                };
                let message = format!("{moved}: {}", reasons.join("; "));
                Err(ApiError::message(Status::Internal, message))
            }
        });
    }
}

/// The number of applications that the guest has moved, if all are now served as requested.
pub(super) fn applications_served(
    by: &Seat,
    answer: Result<Answer, Unknown>,
) -> Result<u16, String> {
    let Answer { outcome, reason } = answer.map_err(|unknown| unknown.to_string())?;
    let count = outcome.applications;
    let why = match reason.is_empty() {
        true => "its agent's log says why",
        false => &reason,
    };
    Err(match outcome.kind {
        OutcomeKind::Done => return Ok(count),
        OutcomeKind::Stay => {
            format!("{count} of the guest's applications do not go to {by}: {why}")
        }
        OutcomeKind::InUse => format!(
            "{count} processes of the guest use the device beside its own pool, and have to let go of it \
             first: {why}"
        ),
        OutcomeKind::Cannot | OutcomeKind::Begun => {
            let what = match by {
                Seat::Local => "it does not start",
                Seat::Host | Seat::At(_) | Seat::Away(_) | Seat::Parked(_) | Seat::Examined => {
                    "what that has started does not end"
                }
            };
            format!("the guest has no pool of its own (gantry-agent --local), or {what}: {why}")
        }
    })
}

/// The side that is to serve all of the guest's applications, if the request asks for that.
fn seat(request: &VmMoveAccel) -> Result<Option<Seat>, ApiError> {
    let wrong = |message: String| Err(ApiError::message(Status::BadRequest, message));
    Ok(match (request.seat, &request.address) {
        (None, None) => None,
        (Some(AccelSeat::Local), None) => Some(Seat::Local),
        (Some(AccelSeat::Host), None) => Some(Seat::Host),
        (Some(AccelSeat::Parked), None) => Some(Seat::Parked(None)),
        (None, Some(address)) => match Address::new(address.clone()) {
            Ok(address) => Some(Seat::At(address)),
            Err(error) => return wrong(error.to_string()),
        },
        (Some(_), Some(_)) => return wrong("seat and address exclude each other".to_owned()),
    })
}

/// The worker pool settings of an accelerator.
pub(super) fn ring<'a>(config: &'a mut VmConfig, id: &str) -> Option<&'a mut RingConfig> {
    let mut accels = config.accels.iter_mut().flatten();
    let named = |accel: &&mut AccelConfig| accel.common().id.as_deref() == Some(id);
    match &mut accels.find(named)?.via {
        AccelVia::Ring(ring) => Some(ring),
        AccelVia::Gate(_) => None,
    }
}
