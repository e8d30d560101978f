//! The rigs and the integration scenarios that run in them.
