#include "bind.h"
#include "transport/null_link.h"
#include "transport/peer_listener.h"

#include <poll.h>
#include <unistd.h>

namespace kvtransfer::python {

namespace {

// One row of the array that post() takes.
struct WorkRequestRow {
  uint64_t local_offset;
  uint64_t remote_offset;
  uint64_t length;
  uint64_t cookie;
  uint32_t immediate;
  uint16_t local_region;
  uint16_t remote_region;
  uint8_t op;  // LinkOp
};

WorkRequest to_request(const WorkRequestRow& row) {
  WorkRequest request;
  request.op = static_cast<LinkOp>(row.op);
  request.local_region = row.local_region;
  request.remote_region = row.remote_region;
  request.immediate = row.immediate;
  request.local_offset = row.local_offset;
  request.remote_offset = row.remote_offset;
  request.length = row.length;
  return request;
}

void check_rows(const Array<WorkRequestRow>& rows) {
  for (py::ssize_t i = 0; i < rows.size(); ++i) {
    if (rows.data()[i].op > static_cast<uint8_t>(LinkOp::kWriteWithImmediate)) {
      throw Error(ErrorCode::kInvalidArgument, "WorkRing: row " + std::to_string(i) + " has op " +
                                                   std::to_string(rows.data()[i].op) +
                                                   "; 0 write, 1 read, 2 write_imm");
    }
  }
}

// Rows that the ring took, from the first on.
py::ssize_t post_rows(LinkRing& self, const Array<WorkRequestRow>& rows) {
  check_rows(rows);
  const py::gil_scoped_release release;
  py::ssize_t posted = 0;
  while (posted < rows.size()) {
    const WorkRequestRow& row = rows.data()[posted];
    if (!self.ring.post(to_request(row), row.cookie)) break;
    ++posted;
  }
  self.ring.doorbell();
  return posted;
}

// A millisecond at most: an adopted queue pair has no event channel.
void sleep_until_event(Link& link) {
  pollfd ready{link.event_fd(), POLLIN, 0};
  if (link.arm()) ::poll(&ready, 1, 1);
}

using Retirements = std::vector<std::pair<uint64_t, std::string>>;

// Waits until something retires; empty at the deadline.
Retirements poll_retired(LinkRing& self, double timeout_s) {
  const py::gil_scoped_release release;
  const int64_t deadline = deadline_from(timeout_s);
  Retired retired[256];
  for (;;) {
    const size_t n = self.ring.poll(retired);
    Retirements out;
    for (size_t i = 0; i < n; ++i) {
      out.emplace_back(retired[i].cookie, work_status_name(retired[i].status));
    }
    self.ring.doorbell();
    if (n > 0 || now_ns() >= deadline) return out;
    sleep_until_event(*self.link);
  }
}

std::vector<uint32_t> poll_immediates(LinkRing& self, double timeout_s) {
  const py::gil_scoped_release release;
  const int64_t deadline = deadline_from(timeout_s);
  uint32_t values[256];
  for (;;) {
    self.ring.poll({});  // takes completions; what retires stays for poll()
    const size_t n = self.link->poll_immediates(values);
    if (n > 0 || now_ns() >= deadline) return {values, values + n};
    sleep_until_event(*self.link);
  }
}

// Posts the rows over and over, `window` of them outstanding at most, until `count` requests have
// retired. Returns (posting seconds, total seconds, per-batch posting ns).
py::tuple drive(LinkRing& self, const Array<WorkRequestRow>& rows, uint64_t count,
                uint32_t window) {
  check_rows(rows);
  if (rows.size() == 0) throw Error(ErrorCode::kInvalidArgument, "WorkRing: no rows to drive");
  std::vector<WorkRequest> requests;
  for (py::ssize_t i = 0; i < rows.size(); ++i) requests.push_back(to_request(rows.data()[i]));
  std::vector<double> batches;
  int64_t posting = 0;
  int64_t total = 0;
  {
    const py::gil_scoped_release release;
    const int64_t begin = now_ns();
    uint64_t posted = 0, retired_count = 0;
    Retired retired[256];
    while (retired_count < count && !self.ring.failed()) {
      const int64_t before = now_ns();
      const uint64_t first = posted;
      while (posted < count && posted - retired_count < window && posted - first < self.batch) {
        if (!self.ring.post(requests[posted % requests.size()], posted)) break;
        ++posted;
      }
      self.ring.doorbell();
      const int64_t after = now_ns();
      if (posted - first == self.batch) {
        batches.push_back(static_cast<double>(after - before) / self.batch);
      }
      posting += after - before;
      retired_count += self.ring.poll(retired);
    }
    total = now_ns() - begin;
  }
  if (self.ring.failed()) raise_outcome(self.ring.failure());
  return py::make_tuple(posting * 1e-9, total * 1e-9, to_array(batches));
}

// Both ends of a shm link in this process, and a region on each side.
struct ShmLoop {
  explicit ShmLoop(size_t bytes)
      : here(std::make_shared<MemoryRegion>(bytes, RegionKind::kShared)),
        there(std::make_shared<MemoryRegion>(bytes, RegionKind::kShared)),
        far(make_shm_listener(address("far"), {"far", 1, {there}}, {there}, [] {})),
        near(make_shm_listener(address("near"), {"near", 1, {here}}, {here}, [] {})),
        links(near->connect(far->address(), deadline_from(5.0))) {}
  std::string address(const char* end) const {
    return "kvt-ring-" + std::to_string(getpid()) + "-" +
           std::to_string(reinterpret_cast<uintptr_t>(this)) + "-" + end;
  }
  std::shared_ptr<MemoryRegion> here, there;
  std::unique_ptr<PeerListener> far, near;
  PeerLinks links;
};

std::unique_ptr<LinkRing> make_shm_ring(size_t num_bytes, uint32_t batch) {
  auto loop = std::make_shared<ShmLoop>(num_bytes);
  auto link = std::move(loop->links.front());
  py::capsule owner(new std::shared_ptr<ShmLoop>(std::move(loop)),
                    [](void* held) { delete static_cast<std::shared_ptr<ShmLoop>*>(held); });
  return std::make_unique<LinkRing>(std::move(link), batch, std::move(owner));
}

}  // namespace

void bind_work_ring(py::module_& m) {
  PYBIND11_NUMPY_DTYPE(WorkRequestRow, local_offset, remote_offset, length, cookie, immediate,
                       local_region, remote_region, op);
  py::class_<LinkRing>(m, "WorkRing", "The doorbell-batched ring over one link. One thread's.")
      .def_property_readonly_static(
          "DTYPE", [](const py::object&) { return py::dtype::of<WorkRequestRow>(); })
      .def("post", &post_rows, py::arg("requests"),
           "Posts rows of DTYPE (op: 0 write, 1 read, 2 write_imm) and rings; the number taken.")
      .def("poll", &poll_retired, py::arg("timeout_s") = 0.0, "[(cookie, status)] of what retired.")
      .def("poll_immediates", &poll_immediates, py::arg("timeout_s") = 0.0)
      .def("drive", &drive, py::arg("requests"), py::arg("count"), py::arg("window"),
           "Benchmark loop: (posting s, total s, ns per request of each full batch).")
      .def("fail",
           [](LinkRing& self) {
             self.ring.fail({ErrorCode::kCancelled, 0, "taken down by the caller"});
           })
      .def_property_readonly("outstanding",
                             [](const LinkRing& self) { return self.ring.outstanding(); })
      .def_property_readonly("failed", [](const LinkRing& self) { return self.ring.failed(); })
      .def_property_readonly("drained", [](const LinkRing& self) { return self.link->drained(); })
      .def_property_readonly("failure",
                             [](const LinkRing& self) -> py::object {
                               if (!self.ring.failed()) return py::none();
                               return py::str(self.ring.failure().text);
                             })
      .def_property_readonly("counters",
                             [](const LinkRing& self) { return to_dict(self.ring.counters()); })
      .def_property_readonly("peer", [](const LinkRing& self) { return self.link->peer(); })
      .def_property_readonly("peer_epoch",
                             [](const LinkRing& self) { return self.link->peer_epoch(); })
      .def_property_readonly("attributes",
                             [](const LinkRing& self) { return to_dict(self.link->attributes()); });
  m.def(
      "make_null_ring",
      [](uint32_t batch) { return std::make_unique<LinkRing>(make_null_link(), batch); },
      py::arg("batch") = WorkRingOptions{}.batch,
      "A ring over a link that moves nothing and completes at once: the ring's own cost.");
  m.def("make_shm_ring", &make_shm_ring, py::arg("num_bytes"),
        py::arg("batch") = WorkRingOptions{}.batch,
        "A ring over a shm link between two regions of this process.");
}

}  // namespace kvtransfer::python
