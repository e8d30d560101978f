//! Entry points that programs look for by name and that are not supported.

use crate::{NOT_SUPPORTED, nvmlReturn_t};

/// Parameters are left out: those that a caller passes in registers or on its stack are its own to
/// remove, and nothing reads them.
macro_rules! refused {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> nvmlReturn_t {
            NOT_SUPPORTED
        }
    )*};
}

// What nvidia-smi, pynvml's users, PyTorch and JAX ask beside what is answered.
refused! {
    nvmlSystemGetDriverVersion nvmlSystemGetNVMLVersion nvmlSystemGetProcessName
    nvmlDeviceGetUtilizationRates nvmlDeviceGetTemperature nvmlDeviceGetPowerUsage
    nvmlDeviceGetPowerManagementLimit nvmlDeviceGetEnforcedPowerLimit
    nvmlDeviceGetTotalEnergyConsumption nvmlDeviceGetFanSpeed nvmlDeviceGetClockInfo
    nvmlDeviceGetPerformanceState nvmlDeviceGetPersistenceMode nvmlDeviceGetDisplayActive
    nvmlDeviceGetMigMode nvmlDeviceGetMaxMigDeviceCount nvmlDeviceGetMigDeviceHandleByIndex
    nvmlDeviceGetBAR1MemoryInfo nvmlDeviceGetMinorNumber nvmlDeviceGetSerial nvmlDeviceGetBrand
    nvmlDeviceGetVbiosVersion nvmlDeviceGetComputeRunningProcesses
    nvmlDeviceGetComputeRunningProcesses_v2 nvmlDeviceGetComputeRunningProcesses_v3
    nvmlDeviceGetGraphicsRunningProcesses nvmlDeviceGetGraphicsRunningProcesses_v3
    nvmlDeviceGetProcessUtilization nvmlDeviceGetNvLinkState nvmlDeviceGetNvLinkRemotePciInfo_v2
    nvmlDeviceGetNvLinkRemoteDeviceType nvmlDeviceGetNvLinkCapability nvmlDeviceGetP2PStatus
    nvmlDeviceGetTopologyCommonAncestor nvmlDeviceGetCpuAffinity nvmlDeviceGetCurrPcieLinkWidth
    nvmlDeviceGetMaxPcieLinkGeneration nvmlDeviceGetPcieThroughput nvmlDeviceGetFieldValues
    nvmlDeviceGetGpuFabricInfoV nvmlDeviceGetMemoryAffinity nvmlEventSetCreate
    nvmlDeviceRegisterEvents
}
