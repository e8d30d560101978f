//! Sessions of applications that call an OpenCL that does nothing: what is true of sessions whatever their API.

mod limit;
mod passive;
mod sharing;
mod work;
