// The scenario of docs/simulator.md, section "Against ns-3", DCTCP, in ns-3: prints the scenario and what ns-3 makes of it as
// JSON. Senders on one switch fill one receiver's link, whose port marks above a threshold and never drops. How to build
// and run it: README.md.

#include <ns3/applications-module.h>
#include <ns3/core-module.h>
#include <ns3/internet-module.h>
#include <ns3/network-module.h>
#include <ns3/point-to-point-module.h>
#include <ns3/traffic-control-module.h>

#include <algorithm>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <vector>

using namespace ns3;

namespace
{

constexpr uint64_t RATE_BPS = 10'000'000'000;
constexpr uint64_t SENDER_BPS = 25'000'000'000;
constexpr uint64_t STAGGER_PS = 1'000'037'000;
constexpr uint64_t MEASURED_FROM_PS = 100'000'000'000;
constexpr uint64_t END_PS = 200'000'000'000;
// As in crosscheck.cc: 1538 bytes on the link in both simulators.
constexpr uint32_t LINK_BYTES = 1538;
constexpr uint32_t OVERHEAD_BYTES = 42;
constexpr uint16_t MTU = 1600;
constexpr uint32_t WINDOW_INITIAL_SEGMENTS = 10;
constexpr uint32_t WINDOW_MAX_BYTES = 4 << 20;
constexpr uint16_t PORT = 4801;

struct Scene
{
    uint32_t senders;
    uint64_t delayPs; // of each of the two links on the way
    uint32_t thresholdSegments;
};

// Few with a long round trip, DLCP's threshold; many with a short one.
const std::vector<Scene> SCENES = {{2, 20'000'000, 65}, {8, 20'000'000, 65}, {8, 5'000'000, 20}};

struct Result
{
    std::vector<uint64_t> deliveredSegments;
    double queueSegmentsMean = 0;
    uint32_t queueSegmentsMax = 0;
    uint64_t dropped = 0;
};

// The queue's length over time, while it is measured.
struct Length
{
    int64_t sincePs = MEASURED_FROM_PS;
    uint32_t packets = 0;
    uint32_t most = 0;
    double packetPs = 0;

    void Changes(uint32_t now)
    {
        int64_t time = Simulator::Now().GetPicoSeconds();
        if (time > sincePs)
        {
            packetPs += double(time - sincePs) * packets;
            sincePs = time;
        }
        if (time >= int64_t(MEASURED_FROM_PS))
        {
            most = std::max(most, now);
        }
        packets = now;
    }
};

Result
Play(const Scene& scene)
{
    const uint32_t segmentBytes = LINK_BYTES - OVERHEAD_BYTES;
    Config::SetDefault("ns3::TcpL4Protocol::SocketType", TypeIdValue(TcpDctcp::GetTypeId()));
    Config::SetDefault("ns3::TcpSocketBase::Sack", BooleanValue(false));
    Config::SetDefault("ns3::TcpSocketBase::Timestamp", BooleanValue(false));
    Config::SetDefault("ns3::TcpSocketBase::MinRto", TimeValue(MilliSeconds(10)));
    Config::SetDefault("ns3::TcpSocket::DelAckCount", UintegerValue(1));
    Config::SetDefault("ns3::TcpSocket::SegmentSize", UintegerValue(segmentBytes));
    Config::SetDefault("ns3::TcpSocket::InitialCwnd", UintegerValue(WINDOW_INITIAL_SEGMENTS));
    Config::SetDefault("ns3::TcpSocket::SndBufSize", UintegerValue(WINDOW_MAX_BYTES));
    Config::SetDefault("ns3::TcpSocket::RcvBufSize", UintegerValue(WINDOW_MAX_BYTES));

    NodeContainer senders(scene.senders);
    NodeContainer middle(1);
    NodeContainer receiver(1);
    InternetStackHelper stack;
    stack.SetIpv6StackInstall(false);
    stack.InstallAll();
    Ipv4AddressHelper addresses("10.0.0.0", "255.255.255.252");
    auto join = [&](Ptr<Node> a, Ptr<Node> b, uint64_t bps, QueueSize size) {
        PointToPointHelper link;
        link.SetDeviceAttribute("DataRate", DataRateValue(DataRate(bps)));
        link.SetDeviceAttribute("Mtu", UintegerValue(MTU));
        link.SetChannelAttribute("Delay", TimeValue(PicoSeconds(scene.delayPs)));
        link.SetQueue("ns3::DropTailQueue", "MaxSize", QueueSizeValue(size));
        return link.Install(a, b);
    };
    for (uint32_t i = 0; i < scene.senders; ++i)
    {
        auto devices = join(senders.Get(i), middle.Get(0), SENDER_BPS, QueueSize("100000p"));
        addresses.Assign(devices);
        addresses.NewNetwork();
        TrafficControlHelper().Uninstall(devices);
    }
    // The discipline holds all but one of the packets that wait: the device takes one ahead.
    auto devices = join(middle.Get(0), receiver.Get(0), RATE_BPS, QueueSize("1p"));
    TrafficControlHelper red;
    red.SetRootQueueDisc("ns3::RedQueueDisc",
                         "MinTh",
                         DoubleValue(scene.thresholdSegments),
                         "MaxTh",
                         DoubleValue(scene.thresholdSegments),
                         "QW",
                         DoubleValue(1),
                         "Gentle",
                         BooleanValue(false),
                         "UseEcn",
                         BooleanValue(true),
                         "UseHardDrop",
                         BooleanValue(false),
                         "MeanPktSize",
                         UintegerValue(LINK_BYTES),
                         "LinkBandwidth",
                         DataRateValue(DataRate(RATE_BPS)),
                         "MaxSize",
                         QueueSizeValue(QueueSize("100000p")));
    Ptr<QueueDisc> queue = red.Install(devices.Get(0)).Get(0);
    auto interfaces = addresses.Assign(devices);
    Ipv4GlobalRoutingHelper::PopulateRoutingTables();

    Length length;
    queue->TraceConnectWithoutContext("PacketsInQueue", Callback<void, uint32_t, uint32_t>([&](uint32_t, uint32_t now) {
                                          length.Changes(now);
                                      }));
    std::vector<uint64_t> before(scene.senders);
    ApplicationContainer sinks;
    for (uint32_t i = 0; i < scene.senders; ++i)
    {
        uint16_t port = PORT + i;
        PacketSinkHelper own("ns3::TcpSocketFactory", InetSocketAddress(Ipv4Address::GetAny(), port));
        sinks.Add(own.Install(receiver.Get(0)));
        BulkSendHelper source("ns3::TcpSocketFactory", InetSocketAddress(interfaces.GetAddress(1), port));
        source.SetAttribute("SendSize", UintegerValue(segmentBytes));
        source.Install(senders.Get(i)).Start(PicoSeconds(i * STAGGER_PS));
    }
    auto received = [&](uint32_t i) { return DynamicCast<PacketSink>(sinks.Get(i))->GetTotalRx(); };
    Simulator::Schedule(PicoSeconds(MEASURED_FROM_PS), [&] {
        for (uint32_t i = 0; i < scene.senders; ++i)
        {
            before[i] = received(i);
        }
    });
    Simulator::Stop(PicoSeconds(END_PS));
    Simulator::Run();
    Result result;
    length.Changes(length.packets);
    result.queueSegmentsMean = length.packetPs / double(END_PS - MEASURED_FROM_PS);
    result.queueSegmentsMax = length.most;
    result.dropped = queue->GetStats().nTotalDroppedPackets;
    for (uint32_t i = 0; i < scene.senders; ++i)
    {
        result.deliveredSegments.push_back((received(i) - before[i]) / segmentBytes);
    }
    Simulator::Destroy();
    return result;
}

} // namespace

int
main()
{
    Time::SetResolution(Time::PS);
    std::printf("{\"ns3\": \"%s\", \"sender_bps\": %" PRIu64 ", \"receiver_bps\": %" PRIu64 ", \"stagger_ps\": %" PRIu64
                ",\n \"measured_from_ps\": %" PRIu64 ", \"end_ps\": %" PRIu64
                ", \"link_bytes\": %u, \"window_initial_segments\": %u, \"window_max_bytes\": %u,\n \"scenes\": [\n",
                NS3_VERSION,
                SENDER_BPS,
                RATE_BPS,
                STAGGER_PS,
                MEASURED_FROM_PS,
                END_PS,
                LINK_BYTES,
                WINDOW_INITIAL_SEGMENTS,
                WINDOW_MAX_BYTES);
    for (size_t i = 0; i < SCENES.size(); ++i)
    {
        const Scene& scene = SCENES[i];
        Result result = Play(scene);
        std::printf("  {\"senders\": %u, \"delay_ps\": %" PRIu64 ", \"threshold_segments\": %u,\n   \"queue_segments_mean\": %.2f, "
                    "\"queue_segments_max\": %u, \"dropped\": %" PRIu64 ", \"delivered_segments\": [",
                    scene.senders,
                    scene.delayPs,
                    scene.thresholdSegments,
                    result.queueSegmentsMean,
                    result.queueSegmentsMax,
                    result.dropped);
        for (size_t j = 0; j < result.deliveredSegments.size(); ++j)
        {
            std::printf("%s%" PRIu64, j ? ", " : "", result.deliveredSegments[j]);
        }
        std::printf("]}%s\n", i + 1 < SCENES.size() ? "," : "");
    }
    std::printf(" ]}\n");
}
