//! Programs of ports for native contexts that are suspended while their VM is saved or moved: the guest's agent has it done,
//! and the guest's memory then has all of them.

use base::Patience;
use remoting_proto::port::OutcomeKind;

use super::{
    handle::Handle,
    wish::{Answer, Seat, Unknown},
};

/// Ports whose programs are suspended, by the numbers of these requests. They are resumed when this is dropped, as soon as the
/// guest runs, unless a later request says otherwise.
#[derive(Default)]
pub(super) struct Suspended(Vec<(Handle, u8)>);

impl Suspended {
    /// Has the programs of these ports suspended, in a guest that runs. Ports that are not in use are left as they are.
    ///
    /// # Errors
    /// Why some stay. All are resumed.
    pub fn new(ports: &[(String, Handle)], patience: &Patience) -> Result<Self, Vec<String>> {
        let mut suspended = Self::default();
        let mut reasons = Vec::new();
        for (id, port) in in_use(ports) {
            match ask(id, port, &Seat::Parked(None), patience) {
                Ok(number) => suspended.0.push((port.clone(), number)),
                Err(why) => reasons.push(why),
            }
        }
        match reasons.is_empty() {
            true => Ok(suspended),
            false => Err(reasons),
        }
    }
}

impl Drop for Suspended {
    fn drop(&mut self) {
        for (port, number) in &self.0 {
            port.withdraw_own_seats(*number);
        }
    }
}

/// Why programs of these ports cannot be suspended, as far as the guest knows while they run.
pub(super) fn obstacles(ports: &[(String, Handle)], patience: &Patience) -> Vec<String> {
    let asked = in_use(ports).map(|(id, port)| {
        // The question is withdrawn once it is answered: it must not keep programs suspended.
        ask(id, port, &Seat::Examined, patience).map(|number| port.withdraw_own_seats(number))
    });
    asked.filter_map(Result::err).collect()
}

/// Ports for native contexts that programs use.
fn in_use(ports: &[(String, Handle)]) -> impl Iterator<Item = (&str, &Handle)> {
    let native = ports.iter().filter(|(_, port)| port.has_native_programs());
    native.map(|(id, port)| (id.as_str(), port))
}

/// Returns the number of the request, which stands.
fn ask(id: &str, port: &Handle, seat: &Seat, patience: &Patience) -> Result<u8, String> {
    let why = match port.ask_seats(seat, patience.left(), patience.cancellation()) {
        Ok(Answer { outcome, .. }) if outcome.kind == OutcomeKind::Done => {
            if *seat != Seat::Examined {
                let count = outcome.applications;
                log::info!("{id:?}: {count} programs are suspended in the guest's memory");
            }
            return Ok(outcome.number);
        }
        Ok(Answer { reason, .. }) if reason.is_empty() => "its agent's log says why".to_owned(),
        Ok(Answer { reason, .. }) => reason,
        // It is withdrawn: the agent resumes what it has suspended.
        Err(Unknown::Cancelled) => "it was cancelled".to_owned(),
        Err(unknown) => unknown.to_string(),
    };
    Err(format!(
        "{id}: the guest's CUDA programs cannot be suspended: {why}"
    ))
}
