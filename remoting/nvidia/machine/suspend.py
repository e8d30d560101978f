"""The driver's checkpoint functions for another process: suspend.py PROCESS NAME..."""
import ctypes
import sys
import time

driver = ctypes.CDLL("libcuda.so.1")
print("cuInit", driver.cuInit(0))
process = ctypes.c_int(int(sys.argv[1]))
for name in sys.argv[2:]:
    begin = time.perf_counter()
    code = getattr(driver, "cuCheckpointProcess" + name)(process, None)
    print(f"{name} {code}, {(time.perf_counter() - begin) * 1000:.0f} ms", flush=True)
state = ctypes.c_int(-1)
driver.cuCheckpointProcessGetState(process, ctypes.byref(state))
print("state", state.value)
