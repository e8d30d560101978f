//! The first messages to a back end, in which both sides agree on features.

use std::{path::Path, thread, time::Duration};

use vhost::vhost_user::message::{
    FrontendReq, VhostUserConfig, VhostUserConfigFlags, VhostUserProtocolFeatures as Protocol,
    VhostUserVirtioFeatures,
};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use vm_memory::ByteValued;

use crate::{
    connection::{Connection, Deadline, Failure},
    error::Error,
    memory::{Slots, TABLE},
    model::{Config, Model},
};

/// Time limit for all first messages. A client waits for its device meanwhile, and nobody else does.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long nobody looks for a socket that is not there.
const BREATH: Duration = Duration::from_millis(20);

/// The feature by which protocol features are agreed on, and queues are enabled one by one.
pub(crate) const PROTOCOL_FEATURES: u64 = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();

/// A back end that has agreed to serve a device.
#[derive(Debug)]
pub struct Backend {
    pub(crate) connection: Connection,
    /// Virtio features that it has.
    pub(crate) features: u64,
    /// Protocol features that both sides use.
    pub(crate) protocol: Protocol,
    /// How it maps memory.
    pub(crate) slots: Slots,
    /// The device's configuration, as the driver sees it.
    pub(crate) config: Vec<u8>,
}

impl Backend {
    /// Connects to the back end that listens at a socket, or soon does: some end when a guest is reset, and are started
    /// again. Takes at most ten seconds.
    ///
    /// # Errors
    /// Nobody listens, or it does not answer or cannot serve the device.
    pub fn connect(path: &Path, model: &Model) -> Result<Self, Error> {
        Self::connect_within(path, model, PATIENCE)
    }

    pub(crate) fn connect_within(
        path: &Path,
        model: &Model,
        patience: Duration,
    ) -> Result<Self, Error> {
        let deadline = Deadline::after(patience);
        let connection = loop {
            match Connection::open(path) {
                Ok(connection) => break connection,
                Err(_) if !deadline.is_over() => thread::sleep(BREATH),
                Err(source) => {
                    let path = path.to_owned();
                    return Err(Error::Failure { path, source });
                }
            }
        };
        Self::agree(connection, path, model, deadline)
    }

    /// Agrees with the back end at the other end of a connection.
    pub(crate) fn agree(
        mut connection: Connection,
        path: &Path,
        model: &Model,
        deadline: Deadline,
    ) -> Result<Self, Error> {
        let failed = |source| Error::Failure {
            path: path.to_owned(),
            source,
        };
        let lacks = |what| Error::Lacks {
            path: path.to_owned(),
            what,
        };
        connection
            .tell(FrontendReq::SET_OWNER, &[], &[], deadline)
            .map_err(failed)?;
        let features = connection.ask_u64(FrontendReq::GET_FEATURES, deadline);
        let features = features.map_err(failed)?;
        if features & 1 << VIRTIO_F_VERSION_1 == 0 {
            return Err(lacks("VIRTIO_F_VERSION_1"));
        }
        if features & PROTOCOL_FEATURES == 0 {
            return Err(lacks("VHOST_USER_F_PROTOCOL_FEATURES"));
        }
        let offered = connection
            .ask_u64(FrontendReq::GET_PROTOCOL_FEATURES, deadline)
            .map_err(failed)?;
        let mut wanted = Protocol::MQ | Protocol::REPLY_ACK | Protocol::CONFIGURE_MEM_SLOTS;
        if matches!(model.config, Config::Theirs { .. }) {
            wanted |= Protocol::CONFIG;
        }
        if model.resumes {
            wanted |= Protocol::INFLIGHT_SHMFD;
        }
        let protocol = Protocol::from_bits_truncate(offered) & wanted;
        connection
            .tell(
                FrontendReq::SET_PROTOCOL_FEATURES,
                &protocol.bits().to_ne_bytes(),
                &[],
                deadline,
            )
            .map_err(failed)?;
        if protocol.contains(Protocol::REPLY_ACK) {
            connection.set_acknowledges();
        }
        let has = match protocol.contains(Protocol::MQ) {
            true => connection
                .ask_u64(FrontendReq::GET_QUEUE_NUM, deadline)
                .map_err(failed)?,
            false => model.least_queues.into(),
        };
        let wanted = model.queues();
        if has < wanted.into() {
            return Err(Error::Queues {
                path: path.to_owned(),
                wanted,
                has,
            });
        }
        let slots = match protocol.contains(Protocol::CONFIGURE_MEM_SLOTS) {
            true => {
                let slots = connection.ask_u64(FrontendReq::GET_MAX_MEM_SLOTS, deadline);
                Slots::Each(usize::try_from(slots.map_err(failed)?).unwrap_or(usize::MAX))
            }
            false => Slots::Table,
        };
        let config = match &model.config {
            Config::Own(config) => config.clone(),
            Config::Theirs { .. } if !protocol.contains(Protocol::CONFIG) => {
                return Err(lacks("VHOST_USER_PROTOCOL_F_CONFIG"));
            }
            Config::Theirs { len, own } => {
                let config = read_config(&mut connection, *len, deadline);
                let mut config = config.map_err(failed)?;
                let (at, own) = own;
                if let Some(place) = config.get_mut(*at..*at + own.len()) {
                    place.copy_from_slice(own);
                }
                config
            }
        };
        Ok(Self {
            connection,
            features,
            protocol,
            slots,
            config,
        })
    }

    /// The features to offer to the driver.
    pub(crate) fn offered(&self, model: &Model) -> u64 {
        self.features & model.allowed | model.own
    }
}

/// Reads the first `len` bytes of the device's configuration.
fn read_config(
    connection: &mut Connection,
    len: usize,
    deadline: Deadline,
) -> Result<Vec<u8>, Failure> {
    let request = FrontendReq::GET_CONFIG;
    // At most the 256 bytes of a model.
    let head = VhostUserConfig::new(0, len as u32, VhostUserConfigFlags::empty());
    let mut body = head.as_slice().to_vec();
    body.resize(size_of::<VhostUserConfig>() + len, 0);
    let mut answer = connection.ask(request, &body, body.len(), deadline)?;
    let config = answer.split_off(size_of::<VhostUserConfig>());
    // Offset and size, before the flags.
    if answer[..8] != body[..8] {
        return Err(Failure::Lie {
            request,
            what: "the first byte's place",
            value: u32::from_ne_bytes([answer[0], answer[1], answer[2], answer[3]]).into(),
        });
    }
    Ok(config)
}

/// Checks that a back end can map this many regions.
pub(crate) fn check_regions(slots: Slots, regions: usize) -> Result<(), Error> {
    let slots = match slots {
        Slots::Each(slots) => slots,
        Slots::Table => TABLE,
    };
    if regions > slots {
        return Err(Error::Regions { regions, slots });
    }
    Ok(())
}
