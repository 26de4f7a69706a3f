// kvspan._core.CopyQueue; kvspan.host documents it.
#include "kvspan/copy_queue.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "stream.h"
#include "tensor_caster.h"

namespace kvspan::bindings {
namespace {

Device parse_device(const std::string& name) {
  if (name == "cpu") return {};
  if (name == "cuda") return {DeviceType::kCuda, 0};
  if (name.starts_with("cuda:") && name.size() > 5 && name.size() < 9 &&
      std::all_of(name.begin() + 5, name.end(), [](char c) { return c >= '0' && c <= '9'; })) {
    return {DeviceType::kCuda, std::stoi(name.substr(5))};
  }
  throw ArgumentError(concat("device: expected cpu, cuda or cuda:<index>, got ", name));
}

// A wait is cut into pieces of this, so that Ctrl-C is seen.
constexpr double kWaitSeconds = 0.05;

class Job {
 public:
  Job(CopyJob job, py::list tensors) : job_(std::move(job)), tensors_(std::move(tensors)) {}

  const CopyJob& get() const { return job_; }

  const char* state() const {
    switch (job_.state()) {
      case CopyState::kPending:
        return "pending";
      case CopyState::kDone:
        return "done";
      case CopyState::kFailed:
        return "failed";
      default:
        return "cancelled";
    }
  }

  std::optional<bool> wait(std::int64_t num_chunks, std::optional<double> timeout) const {
    double left = timeout.value_or(0);
    while (true) {
      const double seconds = timeout ? std::clamp(left, 0.0, kWaitSeconds) : kWaitSeconds;
      std::optional<bool> answer;
      {
        const py::gil_scoped_release release;
        answer = job_.wait_for(seconds, num_chunks);
      }
      if (answer) return answer;
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      left -= seconds;
      if (timeout && left <= 0) return std::nullopt;
    }
  }

 private:
  CopyJob job_;
  py::list tensors_;  // what is copied, alive
};

class Queue {
 public:
  Queue(const std::string& device, std::int64_t chunk_bytes, std::int64_t max_bytes_in_flight,
        std::int64_t max_bytes_queued, int num_threads, double bytes_per_second)
      : device_(parse_device(device)),
        queue_(
            std::make_shared<CopyQueue>(CopyQueueOptions{.device = device_,
                                                         .chunk_bytes = chunk_bytes,
                                                         .max_bytes_in_flight = max_bytes_in_flight,
                                                         .max_bytes_queued = max_bytes_queued,
                                                         .num_threads = num_threads,
                                                         .bytes_per_second = bytes_per_second})) {}

  ~Queue() { close(); }

  void close() {
    {
      const py::gil_scoped_release release;
      queue_.reset();
    }
    jobs_.clear();
  }

  std::optional<Job> submit(const py::sequence& src, const py::sequence& dst, int priority,
                            py::handle after, bool wait_for_room) {
    KVSPAN_CHECK_ARG(queue_ != nullptr, "this copy queue is closed");
    py::list tensors;
    const std::vector<CopyPiece> from = pieces_of(src, "src", false, tensors);
    const std::vector<CopyPiece> to = pieces_of(dst, "dst", true, tensors);
    auto segments = pair_pieces(from, to);
    const std::shared_ptr<CopyQueue> queue = queue_;
    void* const stream = stream_handle(after, "after");
    std::optional<CopyJob> job;
    {
      const py::gil_scoped_release release;
      job = wait_for_room ? queue->submit(std::move(segments), priority, stream)
                          : queue->try_submit(std::move(segments), priority, stream);
    }
    if (!job) return std::nullopt;
    // Tensors of jobs whose handles are gone stay alive until those are settled.
    std::erase_if(jobs_, [](const Job& j) { return j.get().state() != CopyState::kPending; });
    jobs_.emplace_back(*job, tensors);
    return jobs_.back();
  }

  CopyQueueStats stats() const {
    KVSPAN_CHECK_ARG(queue_ != nullptr, "this copy queue is closed");
    return queue_->stats();
  }

 private:
  // Each item a tensor, or a pair of a pool and the numbers of its blocks.
  std::vector<CopyPiece> pieces_of(const py::sequence& items, const char* list, bool written,
                                   py::list& tensors) const {
    std::vector<CopyPiece> pieces;
    for (std::size_t i = 0; i < items.size(); ++i) {
      const ArgName name(list, static_cast<std::int64_t>(i));
      const py::object item = items[i];
      const bool has_blocks = py::isinstance<py::tuple>(item) && py::len(item) == 2;
      const py::object tensor = has_blocks ? py::object(item[py::int_(0)]) : item;
      const BorrowedTensor borrowed(tensor, name);
      const TensorView& view = borrowed.view();
      KVSPAN_CHECK_ARG(view.device.type == DeviceType::kCpu || view.device == device_, name,
                       ": expected a tensor on cpu or ", to_string(device_), ", got one on ",
                       to_string(view.device));
      KVSPAN_CHECK_ARG(!written || !view.read_only, name,
                       ": expected a writable tensor, got a read-only one");
      if (has_blocks) {
        const py::object blocks = item[py::int_(1)];
        const BorrowedTensor numbers(blocks, "blocks");
        append_block_pieces(view, name, int64_elements(numbers.view(), "blocks"), pieces);
      } else {
        append_pieces(view, pieces);
      }
      tensors.append(tensor);
    }
    return pieces;
  }

  const Device device_;
  std::shared_ptr<CopyQueue> queue_;  // shared with threads that are in submit()
  std::vector<Job> jobs_;
};

py::dict to_dict(const CopyQueueStats& stats) {
  py::dict out;
  out["jobs_done"] = stats.jobs_done;
  out["jobs_failed"] = stats.jobs_failed;
  out["jobs_cancelled"] = stats.jobs_cancelled;
  out["bytes_done"] = stats.bytes_done;
  out["bytes_queued"] = stats.bytes_queued;
  out["bytes_in_flight"] = stats.bytes_in_flight;
  out["most_in_flight"] = stats.most_in_flight;
  return out;
}

}  // namespace

void bind_copy_queue(py::module_& m) {
  py::class_<Job>(m, "CopyJob")
      .def_property_readonly("state", &Job::state)
      .def_property_readonly("num_chunks", [](const Job& j) { return j.get().num_chunks(); })
      .def_property_readonly("num_done", [](const Job& j) { return j.get().num_done(); })
      .def_property_readonly("bytes_done", [](const Job& j) { return j.get().bytes_done(); })
      .def("wait", &Job::wait, py::arg("num_chunks") = -1, py::arg("timeout") = py::none())
      .def(
          "wait_on_stream",
          [](const Job& j, py::handle stream, std::int64_t num_chunks) {
            void* const handle = stream_handle(stream, "stream");
            const py::gil_scoped_release release;
            return j.get().wait_on_stream(handle, num_chunks);
          },
          py::arg("stream"), py::arg("num_chunks") = -1)
      .def(
          "cancel", [](const Job& j) { j.get().cancel(); },
          py::call_guard<py::gil_scoped_release>());

  py::class_<PageLock>(m, "PageLock").def(py::init([](py::handle memory) {
    const BorrowedTensor tensor(memory, "memory");
    std::vector<CopyPiece> pieces;
    append_pieces(tensor.view(), pieces);
    KVSPAN_CHECK_ARG(pieces.size() == 1, "memory: expected one contiguous piece, got ",
                     pieces.size());
    return std::make_unique<PageLock>(pieces[0].data, pieces[0].bytes);
  }));

  py::class_<Queue>(m, "CopyQueue")
      .def(py::init<const std::string&, std::int64_t, std::int64_t, std::int64_t, int, double>(),
           py::arg("device"), py::arg("chunk_bytes"), py::arg("max_bytes_in_flight"),
           py::arg("max_bytes_queued"), py::arg("num_threads"), py::arg("bytes_per_second"))
      .def("submit", &Queue::submit, py::arg("src"), py::arg("dst"), py::arg("priority"),
           py::arg("after"), py::arg("wait_for_room"))
      .def("stats", [](const Queue& q) { return to_dict(q.stats()); })
      .def("close", &Queue::close);
}

}  // namespace kvspan::bindings
