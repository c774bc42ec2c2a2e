// What succeeds and does nothing: what these change or free is not simulated, only kernels read it, or queued work may
// still need it.
#define NOTHING(name) \
  int name(void) { return 0; }
NOTHING(__cudaRegisterFatBinaryEnd) NOTHING(__cudaUnregisterFatBinary) NOTHING(__cudaRegisterVar)
NOTHING(cudaDeviceEnablePeerAccess) NOTHING(cudaFuncSetAttribute)
NOTHING(cudaMemcpyToSymbol) NOTHING(cudaProfilerStart) NOTHING(cudaProfilerStop) NOTHING(cudaStreamDestroy)
NOTHING(cudaThreadExchangeStreamCaptureMode) NOTHING(cudaGraphDestroy) NOTHING(cudaGraphExecDestroy)
NOTHING(cudaUserObjectRelease) NOTHING(cudaGraphRetainUserObject)
NOTHING(cuCtxPushCurrent_v2) NOTHING(cuCtxSetCurrent) NOTHING(cuCtxSetLimit) NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncSetCacheConfig) NOTHING(cuModuleUnload) NOTHING(cuTensorMapEncodeIm2col) NOTHING(cuTensorMapEncodeTiled)
NOTHING(ncclCommDeregister) NOTHING(ncclCommDestroy) NOTHING(ncclCommFinalize) NOTHING(ncclRedOpDestroy)
