#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "copier.h"

namespace kvspan::copy_impl {
namespace {

class CpuCopier : public Copier {
 public:
  explicit CpuCopier(const CopyQueueOptions& options)
      : bytes_per_second_(options.bytes_per_second), copy_(options.copy) {}

  Event mark(void*) override { return nullptr; }

  Event issue(std::span<const CopySegment> segments, const Event&) override {
    const auto start = std::chrono::steady_clock::now();
    std::int64_t bytes = 0;
    for (const CopySegment& segment : segments) bytes += segment.bytes;
    if (copy_) {
      copy_(segments);
    } else {
      for (const CopySegment& segment : segments) {
        std::memcpy(segment.dst, segment.src, static_cast<std::size_t>(segment.bytes));
      }
    }
    if (bytes_per_second_ > 0) {
      const std::chrono::duration<double> least(static_cast<double>(bytes) / bytes_per_second_);
      std::this_thread::sleep_until(start +
                                    std::chrono::duration_cast<std::chrono::nanoseconds>(least));
    }
    return nullptr;
  }

  void wait(const Event&) override {}
  void wait_on_stream(const Event&, void*) override {}

 private:
  const double bytes_per_second_;
  const std::function<void(std::span<const CopySegment>)> copy_;
};

}  // namespace

std::unique_ptr<Copier> make_cpu_copier(const CopyQueueOptions& options) {
  return std::make_unique<CpuCopier>(options);
}

}  // namespace kvspan::copy_impl
