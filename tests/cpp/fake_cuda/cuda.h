// See cuda_runtime.h beside this.
#pragma once

using CUcontext = struct FakeContext*;
enum CUresult { CUDA_SUCCESS = 0 };
