// What surrounds the CUDA kernels: the copy queue's copier, devices and errors, on a CUDA runtime
// of the CPU's own (fake_cuda/). The sources are those of the device, under another name.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#define cuda on_fake_cuda
#include "../../cuda/copy_queue.cu"

namespace kvspan {
namespace {

using copy_impl::Copier;
using copy_impl::Event;

class CudaHostTest : public testing::Test {
 protected:
  CudaHostTest() { fake_cuda::reset(); }

  static std::unique_ptr<Copier> copier_of(int device) {
    CopyQueueOptions options;
    options.device = {DeviceType::kCuda, device};
    return cuda::make_copier(options);
  }

  // Runs the fallback's kernel.
  static void launch_copies(const void* kernel, void** parameters) {
    const auto body = reinterpret_cast<void (*)(cuda::CopySegmentsKernelArgs)>(
        reinterpret_cast<std::uintptr_t>(kernel));
    cuda::HostLauncher{2}(body, 3, 1, *static_cast<cuda::CopySegmentsKernelArgs*>(parameters[0]));
  }

  std::vector<int> src_ = {1, 2, 3, 4, 5, 6, 7, 8}, dst_ = std::vector<int>(8);
  std::vector<CopySegment> segments_ = {{src_.data(), dst_.data(), 16},
                                        {src_.data() + 4, dst_.data() + 4, 12}};
};

TEST_F(CudaHostTest, CopiesComeAfterTheirProducerAndBeforeTheirConsumer) {
  const std::unique_ptr<Copier> copier = copier_of(0);
  FakeStream producer, consumer;
  std::atomic<bool> may_go = false;
  int seen = 0;
  producer.enqueue([&] {
    while (!may_go) std::this_thread::yield();
    src_[0] = 10;
  });
  const Event copied = copier->issue(segments_, copier->mark(&producer));
  copier->wait_on_stream(copied, &consumer);
  consumer.enqueue([&] { seen = dst_[0]; });
  EXPECT_EQ(dst_[0], 0);
  may_go = true;
  consumer.synchronize();
  EXPECT_EQ(seen, 10);
  copier->wait(copied);
  EXPECT_EQ(dst_, (std::vector{10, 2, 3, 4, 5, 6, 7, 0}));
  EXPECT_EQ(fake_cuda::state().num_batches, 1);
}

TEST_F(CudaHostTest, AThreadWithoutADeviceMakesNoContextOnAnother) {
  const std::unique_ptr<Copier> copier = copier_of(1);
  std::thread([&] { copier->wait(copier->issue(segments_, nullptr)); }).join();
  EXPECT_EQ(dst_[6], 7);
  EXPECT_EQ(fake_cuda::state().contexts, std::set<int>{1});
}

TEST_F(CudaHostTest, TheDeviceOfTheThreadIsPutBack) {
  cudaSetDevice(0);
  const std::unique_ptr<Copier> copier = copier_of(1);
  copier->wait(copier->issue(segments_, nullptr));
  int device = -1;
  cudaGetDevice(&device);
  EXPECT_EQ(device, 0);
}

TEST_F(CudaHostTest, AnErrorIsToldOnce) {
  const std::unique_ptr<Copier> copier = copier_of(0);
  fake_cuda::state().batch_error = cudaErrorInvalidValue;
  try {
    copier->issue(segments_, nullptr);
    FAIL() << "expected an error";
  } catch (const DeviceError& error) {
    EXPECT_STREQ(error.what(),
                 "CUDA error in cudaMemcpyBatchAsync: cudaErrorFake (1), asked for by a test");
  }
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  fake_cuda::state().batch_error = cudaSuccess;
  copier->wait(copier->issue(segments_, nullptr));
  EXPECT_EQ(dst_[6], 7);
}

TEST_F(CudaHostTest, WithoutBatchedCopiesAKernelCopiesWhatTheDeviceCanRead) {
  const std::unique_ptr<Copier> copier = copier_of(0);
  fake_cuda::state().batch_error = cudaErrorCallRequiresNewerDriver;
  fake_cuda::state().pageable = {segments_[1].src};
  fake_cuda::state().launched = launch_copies;
  for (int turn = 0; turn < 2; ++turn) {
    dst_.assign(8, 0);
    copier->wait(copier->issue(segments_, nullptr));
    EXPECT_EQ(dst_, (std::vector{1, 2, 3, 4, 5, 6, 7, 0}));
  }
  EXPECT_EQ(fake_cuda::state().num_batches, 1) << "asked for once";
  EXPECT_EQ(fake_cuda::state().num_copies, 2);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(CudaHostTest, CopiesStayOutOfCaptures) {
  const std::unique_ptr<Copier> copier = copier_of(0);
  copier->wait(copier->issue(segments_, nullptr));
  EXPECT_EQ(fake_cuda::state().mode_of_batch, cudaStreamCaptureModeThreadLocal);
  EXPECT_EQ(fake_cuda::capture_mode(), cudaStreamCaptureModeGlobal);
}

}  // namespace
}  // namespace kvspan
