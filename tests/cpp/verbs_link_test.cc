// Real queue pairs: what they move, how they are set up, and how a wait on them ends.
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <thread>

#include "verbs_fixture.h"

namespace kvtransfer {
namespace {

using namespace testing;  // NOLINT: test vocabulary

struct Shape {
  const char* name;
  PostMethod method;
  uint32_t queue_pairs;
};
void PrintTo(const Shape& shape, std::ostream* out) {
  *out << shape.name;
}

class VerbsLinkTest : public ::testing::TestWithParam<Shape> {
 protected:
  void SetUp() override { KVT_NEED_VERBS(); }
  VerbsOptions options(size_t engine) const {
    VerbsOptions out = verbs_options(engine);
    out.post_method = GetParam().method;
    out.queue_pairs = GetParam().queue_pairs;
    return out;
  }
};

TEST_P(VerbsLinkTest, WritesAndReadsMoveTheBytesOfEveryLength) {
  VerbsPair pair(options(0), options(1));
  fill_random(pair.here->data(), pair.here->bytes(), 1);
  uint64_t at = 0;
  const uint64_t lengths[] = {1, 7, 64, 4095, 4096, 4097, 65'536, 200'000};
  for (const uint64_t length : lengths) {
    ASSERT_TRUE(pair.ring->post(VerbsPair::request(LinkOp::kWrite, at, at, length), length));
    at += length;
  }
  EXPECT_EQ(pair.drain().size(), std::size(lengths));
  EXPECT_EQ(std::memcmp(pair.here->data(), pair.there->data(), at), 0);
  std::memset(pair.here->data(), 0, pair.here->bytes());
  for (uint64_t done = 0; const uint64_t length : lengths) {
    ASSERT_TRUE(pair.ring->post(VerbsPair::request(LinkOp::kRead, done, done, length), length));
    done += length;
  }
  EXPECT_EQ(pair.drain().size(), std::size(lengths));
  EXPECT_EQ(std::memcmp(pair.here->data(), pair.there->data(), at), 0);
  EXPECT_FALSE(pair.ring->failed()) << pair.ring->failure().text;
}

// Also what makes striping right: an immediate follows the bytes of every queue pair.
TEST_P(VerbsLinkTest, AnImmediateComesAfterTheBytesPostedBeforeIt) {
  VerbsPair pair(options(0), options(1));
  constexpr uint32_t kRounds = 60, kPieces = 8, kPiece = 4096;
  std::atomic<bool> right{true}, give_up{false};
  std::thread receiver([&] {
    for (uint32_t wanted = 1; wanted <= kRounds && !give_up;) {
      uint32_t got[4];
      WorkCompletion nothing[1];
      pair.b->poll(nothing);
      const size_t n = pair.b->poll_immediates(got);
      for (size_t i = 0; i < n; ++i, ++wanted) {
        right = right && got[i] == wanted;
        for (uint32_t p = 0; p < kPieces; ++p) {
          const uint8_t* at = pair.there->data() + ((wanted % 4) * kPieces + p) * kPiece;
          right = right && at[0] == (wanted & 0xff) && at[kPiece - 1] == (wanted & 0xff);
        }
        // Tell that the area may be written again.
        pair.there->data()[(1 << 20) - 1] = static_cast<uint8_t>(wanted);
      }
    }
  });
  for (uint32_t round = 1; round <= kRounds; ++round) {
    const uint64_t area = (round % 4) * kPieces * kPiece;
    std::memset(pair.here->data() + area, static_cast<int>(round & 0xff), kPieces * kPiece);
    for (uint32_t p = 0; p < kPieces; ++p) {
      const uint64_t at = area + p * kPiece;
      pair.ring->post(VerbsPair::request(LinkOp::kWrite, at, at, kPiece), 1);
    }
    pair.ring->post(VerbsPair::request(LinkOp::kWriteWithImmediate, 0, 0, 0, round), 2);
    pair.ring->doorbell();
    Retired retired[64];
    const int64_t deadline = in_seconds(20);
    volatile const uint8_t* seen = pair.there->data() + (1 << 20) - 1;
    while (*seen != (round & 0xff) && now_ns() < deadline) {
      pair.ring->doorbell();  // what did not fit goes on once something has retired
      pair.ring->poll(retired);
    }
    if (*seen != (round & 0xff)) give_up = true;
    if (give_up) break;
  }
  receiver.join();
  EXPECT_FALSE(give_up);
  EXPECT_TRUE(right.load());
}

TEST_P(VerbsLinkTest, MoreRequestsThanTheQueuesHoldAllRetireInOrder) {
  VerbsOptions small = options(0);
  small.send_depth = 8;
  VerbsPair pair(small, options(1));
  fill_random(pair.here->data(), pair.here->bytes(), 2);
  constexpr uint64_t kCount = 500;
  std::vector<Retired> all;
  uint64_t posted = 0;
  const int64_t deadline = in_seconds(40);
  while (all.size() < kCount && now_ns() < deadline) {
    while (posted < kCount &&
           pair.ring->post(VerbsPair::request(LinkOp::kWrite, posted * 1024, posted * 1024, 1024),
                           posted)) {
      ++posted;
    }
    pair.ring->doorbell();
    Retired some[64];
    const size_t n = pair.ring->poll(some);
    all.insert(all.end(), some, some + n);
  }
  ASSERT_EQ(all.size(), kCount);
  for (uint64_t i = 0; i < kCount; ++i) EXPECT_EQ(all[i].cookie, i);
  EXPECT_EQ(std::memcmp(pair.here->data(), pair.there->data(), kCount * 1024), 0);
  EXPECT_GT(pair.ring->counters().back_pressure, 0u);
}

TEST_P(VerbsLinkTest, AnImmediateWakesAPeerThatSleepsOnItsDescriptor) {
  VerbsPair pair(options(0), options(1));
  std::atomic<int> got{0};
  std::thread sleeper([&] {
    WorkCompletion nothing[1];
    uint32_t immediates[8];
    const int64_t deadline = in_seconds(20);
    while (got < 5 && now_ns() < deadline) {
      pair.b->poll(nothing);
      got += static_cast<int>(pair.b->poll_immediates(immediates));
      if (got >= 5 || !pair.b->arm()) continue;
      pollfd ready{pair.b->event_fd(), POLLIN, 0};
      if (poll(&ready, 1, 10'000) <= 0) return;
    }
  });
  for (uint32_t i = 0; i < 5; ++i) {
    usleep(20'000);
    pair.ring->post(VerbsPair::request(LinkOp::kWriteWithImmediate, 0, 0, 0, i), 1);
    pair.ring->doorbell();
  }
  sleeper.join();
  pair.drain();
  EXPECT_EQ(got.load(), 5);
}

TEST_P(VerbsLinkTest, AnEmptyListIsNoPost) {
  VerbsPair pair(options(0), options(1));
  WorkRequest first = VerbsPair::request(LinkOp::kWrite, 0, 0, 64);
  first.signalled = true;
  ASSERT_EQ(pair.a->post({&first, 1}).accepted, 1u);
  EXPECT_EQ(pair.a->post({}).accepted, 0u);
  EXPECT_EQ(pair.a->post({}).error, 0);
  size_t completions = 0;
  WorkCompletion out[8];
  for (const int64_t stop = in_seconds(0.2); now_ns() < stop;) completions += pair.a->poll(out);
  EXPECT_EQ(completions, 1u);
}

TEST_P(VerbsLinkTest, ManyImmediatesNeverRunOutOfReceives) {
  VerbsOptions few = options(1);
  few.receive_depth = 64;
  VerbsPair pair(options(0), few);
  uint32_t received = 0, posted = 0;
  const int64_t deadline = in_seconds(40);
  while (received < 600 && now_ns() < deadline) {
    while (
        posted < 600 &&
        pair.ring->post(VerbsPair::request(LinkOp::kWriteWithImmediate, 0, 0, 0, posted), posted)) {
      ++posted;
    }
    pair.ring->doorbell();
    Retired retired[64];
    pair.ring->poll(retired);
    WorkCompletion nothing[1];
    pair.b->poll(nothing);
    uint32_t values[64];
    const size_t n = pair.b->poll_immediates(values);
    for (size_t i = 0; i < n; ++i) EXPECT_EQ(values[i], received++);
  }
  EXPECT_EQ(received, 600u);
  EXPECT_FALSE(pair.ring->failed());
}

INSTANTIATE_TEST_SUITE_P(Shapes, VerbsLinkTest,
                         ::testing::Values(Shape{"post_send", PostMethod::kPostSend, 1},
                                           Shape{"wr_api", PostMethod::kWorkRequestApi, 1},
                                           Shape{"striped", PostMethod::kPostSend, 4}),
                         [](const auto& info) { return info.param.name; });

class VerbsSetupTest : public ::testing::Test {
 protected:
  void SetUp() override { KVT_NEED_VERBS(); }
  static std::string refusal(const std::function<void()>& attempt, ErrorCode code) {
    try {
      attempt();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      return error.what();
    }
    ADD_FAILURE() << "nothing was refused";
    return "";
  }
  static std::string value(const Link& link, const std::string& name) {
    for (const auto& [key, text] : link.attributes()) {
      if (key == name) return text;
    }
    return "(absent)";
  }
};

TEST_F(VerbsSetupTest, MessagesAboveTheDevicesLimitAreSplit) {
  VerbsPair pair(20 << 20);
  fill_random(pair.here->data(), pair.here->bytes(), 3);
  const uint64_t limit = pair.a->limits().max_message_bytes;
  ASSERT_LT(limit, 20u << 20) << "this device takes it in one piece";
  ASSERT_TRUE(
      pair.ring->post(VerbsPair::request(LinkOp::kWriteWithImmediate, 0, 0, 20 << 20, 77), 5));
  const auto retired = pair.drain();
  EXPECT_EQ(retired.size(), ((20u << 20) - 1) / limit + 1);
  EXPECT_EQ(std::memcmp(pair.here->data(), pair.there->data(), 20 << 20), 0);
  uint32_t got[2];
  EXPECT_EQ(pair.b->poll_immediates(got), 1u) << "one immediate, with the last piece";
  EXPECT_EQ(got[0], 77u);
}

TEST_F(VerbsSetupTest, TheAttributesTellWhatWasApplied) {
  VerbsOptions options = verbs_options(0);
  options.classes[0] = {0, 104};
  options.classes[1] = {0, 184};
  options.timeout = 18;
  const auto region = make_verbs_region(4096);
  const auto domain = VerbsDomain::open(options, {region}, 1);
  for (const TrafficClass traffic_class : {TrafficClass::kKv, TrafficClass::kModel}) {
    const auto end = domain->make_endpoint(traffic_class, "x", 1);
    const auto other = domain->make_endpoint(traffic_class, "y", 1);
    const auto link = end->connect(other->blob());
    EXPECT_EQ(value(*link, "traffic_class"), traffic_class == TrafficClass::kKv ? "104" : "184");
    EXPECT_EQ(value(*link, "class"), traffic_class_name(traffic_class));
    EXPECT_EQ(value(*link, "timeout"), "18");
    EXPECT_EQ(value(*link, "device"), options.device);
    EXPECT_EQ(value(*link, "state"), "RTS");
  }
}

TEST_F(VerbsSetupTest, OptionsOutOfRangeAreRefusedByName) {
  const auto open = [](VerbsOptions options) {
    VerbsDomain::open(options, {make_verbs_region(4096)}, 1);
  };
  VerbsOptions options = verbs_options(0);
  options.classes[0].service_level = 16;
  EXPECT_NE(refusal([&] { open(options); }, ErrorCode::kInvalidArgument).find("service level 16"),
            std::string::npos);
  options = verbs_options(0);
  options.classes[1].traffic_class = 256;
  EXPECT_NE(refusal([&] { open(options); }, ErrorCode::kInvalidArgument).find("class model"),
            std::string::npos);
  options = verbs_options(0);
  options.device = "mlx5_99";
  EXPECT_NE(refusal([&] { open(options); }, ErrorCode::kUnsupported).find(devices()[0].device),
            std::string::npos);
  options = verbs_options(0);
  options.port = 9;
  refusal([&] { open(options); }, ErrorCode::kInvalidArgument);
  options = verbs_options(0);
  options.gid_index = 200;
  refusal([&] { open(options); }, ErrorCode::kInvalidArgument);
  options = verbs_options(0);
  options.path_mtu_bytes = 1000;
  refusal([&] { open(options); }, ErrorCode::kInvalidArgument);
  options = verbs_options(0);
  options.queue_pairs = 17;
  refusal([&] { open(options); }, ErrorCode::kInvalidArgument);
}

TEST_F(VerbsSetupTest, TheGidIsRoceV2OverIpv4WhereThereIsOne) {
  VerbsPair pair;
  EXPECT_EQ(value(*pair.a, "gid").substr(0, 7), "::ffff:");
}

TEST_F(VerbsSetupTest, ARefusedTransitionNamesDevicePortGidAndBothStates) {
  const std::string text = refusal(
      [] {
        VerbsPair pair(verbs_options(0), verbs_options(1), 4096, [](EndpointInfo& info) {
          const uint8_t nowhere[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 203, 0, 113, 7};
          std::memcpy(info.gid, nowhere, sizeof nowhere);
        });
      },
      ErrorCode::kIo);
  for (const char* part : {"INIT", "RTR", "port 1", "gid", devices()[0].device.c_str()}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
  }
}

TEST_F(VerbsSetupTest, PeersOfAnotherShapeAreRefused) {
  VerbsOptions striped = verbs_options(1);
  striped.queue_pairs = 2;
  refusal([&] { VerbsPair pair(verbs_options(0), striped); }, ErrorCode::kMismatch);
  refusal(
      [] {
        VerbsPair pair(verbs_options(0), verbs_options(1), 4096,
                       [](EndpointInfo& info) { info.traffic_class = TrafficClass::kModel; });
      },
      ErrorCode::kMismatch);
}

TEST_F(VerbsSetupTest, AnEndpointConnectsOnce) {
  const auto domain = VerbsDomain::open(verbs_options(0), {make_verbs_region(4096)}, 1);
  const auto end = domain->make_endpoint(TrafficClass::kKv, "x", 1);
  const auto other = domain->make_endpoint(TrafficClass::kKv, "y", 1);
  const auto link = end->connect(other->blob());
  refusal([&] { end->connect(other->blob()); }, ErrorCode::kInvalidArgument);
}

TEST_F(VerbsSetupTest, ADmaBufThatIsNoneIsATypedError) {
  const auto domain = VerbsDomain::open(verbs_options(0), {make_verbs_region(4096)}, 1);
  const auto memory = MemoryRegion(4096, RegionKind::kShared, HugePages::kOff);
  const std::string text =
      refusal([&] { domain->register_dmabuf(memory.fd(), 0, 4096); }, ErrorCode::kUnsupported);
  EXPECT_NE(text.find("dma-buf"), std::string::npos);
}

TEST_F(VerbsSetupTest, RegionsOfHugePagesAndMemfdsCanBeRegistered) {
  for (const RegionKind kind : {RegionKind::kAnonymous, RegionKind::kShared}) {
    const auto huge = std::make_shared<MemoryRegion>(size_t{4} << 20, kind, HugePages::kAuto);
    const auto domain = VerbsDomain::open(verbs_options(0), {huge}, 1);
    EXPECT_EQ(domain->region(0).bytes, huge->bytes());
    EXPECT_EQ(domain->region(0).address, reinterpret_cast<uint64_t>(huge->data()));
  }
}

TEST_F(VerbsSetupTest, ALoopbackLinkCopiesBetweenOurOwnRegionsThroughTheNic) {
  const auto pool = make_verbs_region(1 << 20), device = make_verbs_region(1 << 20);
  const auto domain = VerbsDomain::open(verbs_options(0), {pool, device}, 1, true);
  const auto link = domain->make_loopback();
  WorkRing ring(*link);
  fill_random(pool->data(), pool->bytes(), 6);
  WorkRequest copy = VerbsPair::request(LinkOp::kWrite, 5000, 70'000, 300'000);
  copy.remote_region = 1;
  ASSERT_TRUE(ring.post(copy, 1));
  ring.doorbell();
  Retired retired[4];
  const int64_t deadline = in_seconds(20);
  while (ring.outstanding() > 0 && now_ns() < deadline) ring.poll(retired);
  EXPECT_FALSE(ring.failed()) << ring.failure().text;
  EXPECT_EQ(std::memcmp(pool->data() + 5000, device->data() + 70'000, 300'000), 0);
  const auto plain = VerbsDomain::open(verbs_options(0), {pool}, 1);
  refusal([&] { plain->make_loopback(); }, ErrorCode::kInvalidArgument);
}

// On a machine without devices this is the whole of what must hold.
TEST(VerbsDevices, NoneIsAnAnswerWithAReason) {
  std::string why;
  const auto ports = verbs_devices(&why);
  EXPECT_EQ(ports.empty(), !why.empty());
  if (!ports.empty()) return;
  try {
    VerbsDomain::open({}, {}, 0);
    ADD_FAILURE() << "opened a device that isn't there";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_GT(std::string(error.what()).size(), 10u);
  }
}

}  // namespace
}  // namespace kvtransfer
