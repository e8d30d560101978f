//! Entry points that programs look up by name and that are not supported.

use crate::{NOT_SUPPORTED, nvmlReturn_t};

/// The functions are defined without parameters: nothing reads them, and removing those that are
/// passed in registers or on the stack is up to the caller.
macro_rules! refused {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> nvmlReturn_t {
            NOT_SUPPORTED
        }
    )*};
}

// What nvidia-smi, users of pynvml, PyTorch and JAX ask for in addition to what is answered.
refused! {
    nvmlSystemGetDriverVersion nvmlSystemGetNVMLVersion nvmlSystemGetProcessName
    nvmlDeviceGetUtilizationRates nvmlDeviceGetTemperature nvmlDeviceGetPowerUsage
    nvmlDeviceGetPowerManagementLimit nvmlDeviceGetEnforcedPowerLimit
    nvmlDeviceGetTotalEnergyConsumption nvmlDeviceGetFanSpeed nvmlDeviceGetClockInfo
    nvmlDeviceGetPerformanceState nvmlDeviceGetPersistenceMode nvmlDeviceGetDisplayActive
    nvmlDeviceGetMigMode nvmlDeviceGetMaxMigDeviceCount nvmlDeviceGetMigDeviceHandleByIndex
    nvmlDeviceGetBAR1MemoryInfo nvmlDeviceGetMinorNumber nvmlDeviceGetSerial nvmlDeviceGetBrand
    nvmlDeviceGetVbiosVersion
    nvmlDeviceGetGraphicsRunningProcesses nvmlDeviceGetGraphicsRunningProcesses_v3
    nvmlDeviceGetProcessUtilization nvmlDeviceGetNvLinkState nvmlDeviceGetNvLinkRemotePciInfo_v2
    nvmlDeviceGetNvLinkRemoteDeviceType nvmlDeviceGetNvLinkCapability nvmlDeviceGetP2PStatus
    nvmlDeviceGetTopologyCommonAncestor nvmlDeviceGetCpuAffinity nvmlDeviceGetCurrPcieLinkWidth
    nvmlDeviceGetMaxPcieLinkGeneration nvmlDeviceGetPcieThroughput nvmlDeviceGetFieldValues
    nvmlDeviceGetGpuFabricInfoV nvmlDeviceGetMemoryAffinity nvmlEventSetCreate
    nvmlDeviceRegisterEvents
}
