//! What devices that lack a feature refuse.

use std::ptr::{null, null_mut};

use super::{Part, device::cl, more::more};

/// `CL_PIPE_PACKET_SIZE`.
const PIPE_PACKET_SIZE: u32 = 0x1120;

pub fn run(part: &mut Part) -> Result<(), String> {
    let (context, queue) = (part.device.context, part.device.queue);
    if part.has("clCreatePipe") {
        let mut code = 0;
        let pipe = more!(part, clCreatePipe(context, 0, 4, 16, null(), &raw mut code));
        part.made("clCreatePipe", pipe, code);
    }
    if part.has("clGetPipeInfo") {
        let buffer = part.numbers(context, &[1])?;
        let mut size = 0u32;
        let to = (&raw mut size).cast();
        let asked = more!(
            part,
            clGetPipeInfo(buffer, PIPE_PACKET_SIZE, 4, to, null_mut())
        );
        part.say("clGetPipeInfo of a buffer", asked);
        cl!(part.device.api, clReleaseMemObject(buffer));
    }
    if part.has("clSetDefaultDeviceCommandQueue") {
        let set = more!(
            part,
            clSetDefaultDeviceCommandQueue(context, part.device.id, queue)
        );
        part.say("clSetDefaultDeviceCommandQueue", set);
    }
    if part.has("clSetProgramReleaseCallback") {
        let set = more!(
            part,
            clSetProgramReleaseCallback(part.program, None, null_mut())
        );
        part.say("clSetProgramReleaseCallback", set);
    }
    let unloaded = more!(part, clUnloadPlatformCompiler(part.device.platform));
    part.say("clUnloadPlatformCompiler", unloaded);
    Ok(())
}
