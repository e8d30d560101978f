//! Accelerators that leave a VM before it goes to another host (`accel=Detach`).
//!
//! The guest is asked to give them up, as by `vm.remove-device`. If the VM stays after all, it gets
//! them back.

use std::{
    thread,
    time::{Duration, Instant},
};

use super::{
    super::{Control, life::Life},
    Job, Leaving, OVER,
};
use crate::{
    api::{Handler, Request, VmRemoveDevice},
    config::AccelConfig,
    migration::{Error, Result, progress::Progress},
};

/// How long the guest may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// How often it is looked whether they have gone.
const LOOK: Duration = Duration::from_millis(50);

/// How far it is.
enum Gone {
    All,
    Some,
    /// The guest keeps one of them, which has this name.
    Not(String),
}

impl Leaving {
    /// Has the guest give all accelerators up, and waits until it has.
    pub(super) fn detach(&self, progress: &Progress) -> Result<()> {
        let number = self.number;
        let over = || Error::Machine(OVER.to_owned());
        let asked = self
            .control
            .ask(move |control| control.ask_for_accels(number));
        asked.ok_or_else(over)?.map_err(Error::Machine)?;
        // The control thread counts, too; this is for one that does not.
        let deadline = Instant::now() + PATIENCE + Duration::from_secs(5);
        loop {
            if progress.is_cancelled() {
                return Err(Error::Cancelled);
            }
            match self.control.ask(|control| control.have_accels_gone()) {
                None => return Err(over()),
                Some(Gone::All) => return Ok(()),
                Some(Gone::Some) if Instant::now() < deadline => thread::sleep(LOOK),
                Some(Gone::Some) => {
                    return Err(Error::Stays(vec!["accelerators have not left".to_owned()]));
                }
                Some(Gone::Not(id)) => {
                    return Err(Error::Stays(vec![format!(
                        "the guest does not give accelerator {id:?} up: see what uses it there, or \
                         take it away without asking (vm.remove-device with force)"
                    )]));
                }
            }
        }
    }
}

impl Control {
    fn accels(&self) -> Vec<AccelConfig> {
        let config = self.life.config();
        let accels = config.and_then(|config| config.accels.as_ref());
        accels.cloned().unwrap_or_default()
    }

    /// Asks the guest for its accelerators, and remembers them.
    fn ask_for_accels(&mut self, number: u64) -> std::result::Result<(), String> {
        let accels = self.accels();
        match &mut self.migrations.job {
            Job::Outgoing {
                number: of,
                detached,
                ..
            } if *of == number => detached.clone_from(&accels),
            _ => return Err(OVER.to_owned()),
        }
        for accel in accels {
            let request = VmRemoveDevice {
                id: accel.common.id.unwrap_or_default(),
                timeout: Some(PATIENCE.as_secs()),
                ..Default::default()
            };
            // One that leaves with another one's slot is on its way already.
            if self.removals.state(&request.id).is_none() {
                self.remove(&request).map_err(|error| error.to_string())?;
            }
        }
        Ok(())
    }

    fn have_accels_gone(&self) -> Gone {
        let accels = self.accels();
        let ids = accels.into_iter().filter_map(|accel| accel.common.id);
        let mut gone = Gone::All;
        for id in ids {
            if self.removals.state(&id).is_none() {
                return Gone::Not(id);
            }
            gone = Gone::Some;
        }
        gone
    }

    /// The VM stays: it gets back what was taken from it.
    pub(super) fn attach_again(&mut self, detached: Vec<AccelConfig>) {
        if !matches!(self.life, Life::Live { .. }) {
            return;
        }
        let present = self.accels();
        for accel in detached {
            let id = accel.common.id.clone().unwrap_or_default();
            let is_there = |other: &AccelConfig| other.common.id == accel.common.id;
            let done = if !present.iter().any(is_there) {
                self.handle(Request::VmAdd(Box::new(accel))).map(drop)
            } else if self.removals.state(&id).is_some() {
                let request = VmRemoveDevice {
                    id: id.clone(),
                    cancel: true,
                    ..Default::default()
                };
                self.remove(&request).map(drop)
            } else {
                Ok(())
            };
            if let Err(error) = done {
                log::error!("the VM stays, and does not get accelerator {id:?} back: {error}");
            }
        }
    }
}
