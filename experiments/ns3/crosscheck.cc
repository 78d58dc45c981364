// The scenario of docs/simulator.md, section "Against ns-3", in ns-3: prints the scenario and what ns-3 makes of it as JSON.
//
// Eight senders and two receivers on two switches joined by a trunk. First constant-rate UDP flows and bursts of all
// senders, so that packets are lost at the trunk and at a receiver's port; then two TCP connections that share a
// receiver's port. Nothing is random. How to build and run it: README.md.

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
#include <iterator>
#include <utility>
#include <vector>

using namespace ns3;

namespace
{

constexpr uint32_t SENDERS = 8;
constexpr uint32_t RECEIVERS = 2;
constexpr uint64_t SENDER_BPS = 25'000'000'000;
constexpr uint64_t TRUNK_BPS = 32'000'000'000;
constexpr uint64_t RECEIVER_BPS = 10'000'000'000;
constexpr uint64_t DELAY_PS = 1'000'000;
constexpr uint32_t HOST_QUEUE_BYTES = 64 << 20; // never full
constexpr uint32_t TRUNK_QUEUE_BYTES = 150'000;
constexpr uint32_t RECEIVER_QUEUE_BYTES = 120'000;

// What ns-3 adds to a payload on a point-to-point link: PPP 2, IPv4 20, UDP 8 or TCP without options 20. What is sent is
// given in bytes on the link, and the payload chosen so that there are as many as in fanin, whose links are Ethernet's.
constexpr uint32_t UDP_OVERHEAD_BYTES = 30;
constexpr uint32_t TCP_OVERHEAD_BYTES = 42;
// For the longest TCP segment, whose payload makes up for the missing Ethernet framing.
constexpr uint16_t MTU = 1600;
constexpr uint16_t UDP_PORT = 4800;
constexpr uint16_t TCP_PORT = 4801;

struct Flow
{
    uint32_t sender;
    uint32_t receiver;
    uint64_t startPs;
    uint64_t intervalPs; // 0: all packets at once
    uint32_t packets;
    uint32_t linkBytes;
};

// Starts, intervals and sizes are chosen so that every transmission takes whole picoseconds, where the simulators would
// otherwise round in their own ways, and that no two events at one port fall into the same one, where the order would be
// each simulator's own. `Port::ties` tells whether that is so.
std::vector<Flow>
Flows()
{
    std::vector<Flow> flows;
    // 7.1 Gbit/s to each receiver.
    for (uint64_t i = 0; i < SENDERS; ++i)
    {
        flows.push_back({uint32_t(i),
                         uint32_t(i % RECEIVERS),
                         1'003 + 601'037 * i,
                         4'801'019 + 34'063 * i,
                         400,
                         uint32_t(1090 - 7 * i)});
    }
    // Bursts of all senders: to one receiver, then to both.
    for (uint64_t i = 0; i < SENDERS; ++i)
    {
        flows.push_back({uint32_t(i), 0, 400'003'117 + 97'151 * i, 0, 48, uint32_t(1475 - 37 * i)});
    }
    for (uint64_t i = 0; i < SENDERS; ++i)
    {
        flows.push_back({uint32_t(i), uint32_t(i / 4), 1'200'011'231 + 211'073 * i, 0, 32, uint32_t(1475 - 23 * i)});
    }
    return flows;
}

constexpr uint32_t TCP_FLOWS = 2; // from the first senders to receiver 0
constexpr uint64_t TCP_START_PS = 10'000'000'000;
constexpr uint64_t TCP_STAGGER_PS = 1'000'037'000;
constexpr uint64_t TCP_END_PS = 210'000'000'000;
constexpr uint32_t TCP_LINK_BYTES = 1538;
constexpr uint32_t TCP_WINDOW_INITIAL_SEGMENTS = 10;
// Somewhat more than link and queue hold: each connection alone meets the queue's end.
constexpr uint32_t TCP_WINDOW_MAX_SEGMENTS = 120;
constexpr uint64_t TCP_RTO_MIN_PS = 10'000'000'000;

// What one egress port of a switch did, and how often two of its events fell into the same picosecond.
struct Port
{
    uint64_t dropped = 0;
    uint64_t queueBytesMax = 0;
    uint64_t ties = 0;
    int64_t lastArrivalPs = -1;
    int64_t lastDeparturePs = -1;

    void Arrival()
    {
        int64_t now = Simulator::Now().GetPicoSeconds();
        ties += now == lastArrivalPs || now == lastDeparturePs;
        lastArrivalPs = now;
    }

    void Departure()
    {
        lastDeparturePs = Simulator::Now().GetPicoSeconds();
        ties += lastDeparturePs == lastArrivalPs;
    }

    void Watch(Ptr<NetDevice> device)
    {
        using OnPacket = Callback<void, Ptr<const Packet>>;
        auto link = DynamicCast<PointToPointNetDevice>(device);
        link->TraceConnectWithoutContext("MacTx", OnPacket([this](Ptr<const Packet>) { Arrival(); }));
        link->TraceConnectWithoutContext("PhyTxEnd", OnPacket([this](Ptr<const Packet>) { Departure(); }));
        auto queue = link->GetQueue();
        queue->TraceConnectWithoutContext("Drop", OnPacket([this](Ptr<const Packet>) { ++dropped; }));
        queue->TraceConnectWithoutContext("BytesInQueue",
                                          Callback<void, uint32_t, uint32_t>([this](uint32_t, uint32_t now) {
                                              queueBytesMax = std::max<uint64_t>(queueBytesMax, now);
                                          }));
    }
};

// The first bytes of a payload say which packet it is.
struct Mark
{
    uint32_t flow;
    uint32_t number;
};

constexpr int64_t LOST = -1;

struct Outcome
{
    std::vector<int64_t> sentPs;
    std::vector<int64_t> latencyPs; // of each packet, in the order of sending; LOST
    int64_t lastDeliveryPs = 0;
};

class World
{
  public:
    World()
        : m_flows(Flows())
    {
        Build();
        ScheduleUdp();
        ScheduleTcp();
    }

    void Print() const;

  private:
    NetDeviceContainer Join(Ptr<Node> a, Ptr<Node> b, uint64_t bps, uint32_t queueBytes)
    {
        PointToPointHelper link;
        link.SetDeviceAttribute("DataRate", DataRateValue(DataRate(bps)));
        link.SetDeviceAttribute("Mtu", UintegerValue(MTU));
        link.SetChannelAttribute("Delay", TimeValue(PicoSeconds(DELAY_PS)));
        // The packet on the wire does not count: ns-3 takes it out of the queue before it sends it.
        link.SetQueue("ns3::DropTailQueue",
                      "MaxSize",
                      QueueSizeValue(QueueSize(QueueSizeUnit::BYTES, queueBytes)));
        // With flow control the layer above would drop, unseen by the queue.
        link.DisableFlowControl();
        NetDeviceContainer devices = link.Install(a, b);
        m_addresses.Assign(devices);
        m_addresses.NewNetwork();
        return devices;
    }

    void Build()
    {
        m_senders.Create(SENDERS);
        m_receivers.Create(RECEIVERS);
        NodeContainer switches(2);
        // No IPv6, whose announcements come at random times.
        InternetStackHelper stack;
        stack.SetIpv6StackInstall(false);
        stack.InstallAll();
        m_addresses.SetBase("10.0.0.0", "255.255.255.252");

        for (uint32_t i = 0; i < SENDERS; ++i)
        {
            Join(m_senders.Get(i), switches.Get(0), SENDER_BPS, HOST_QUEUE_BYTES);
        }
        m_trunk.Watch(Join(switches.Get(0), switches.Get(1), TRUNK_BPS, TRUNK_QUEUE_BYTES).Get(0));
        for (uint32_t i = 0; i < RECEIVERS; ++i)
        {
            auto link = Join(switches.Get(1), m_receivers.Get(i), RECEIVER_BPS, RECEIVER_QUEUE_BYTES);
            m_receiverPorts[i].Watch(link.Get(0));
            auto ipv4 = m_receivers.Get(i)->GetObject<Ipv4>();
            m_destinations.push_back(ipv4->GetAddress(ipv4->GetInterfaceForDevice(link.Get(1)), 0).GetLocal());
        }
        RemoveQueueDisciplines(NodeContainer(switches, m_senders, m_receivers));
        Ipv4GlobalRoutingHelper::PopulateRoutingTables();
    }

    // Assigning addresses has installed one on each device, above the queue that is compared.
    static void RemoveQueueDisciplines(const NodeContainer& nodes)
    {
        for (uint32_t i = 0; i < nodes.GetN(); ++i)
        {
            auto layer = nodes.Get(i)->GetObject<TrafficControlLayer>();
            for (uint32_t j = 0; j < nodes.Get(i)->GetNDevices(); ++j)
            {
                auto device = nodes.Get(i)->GetDevice(j);
                if (layer->GetRootQueueDiscOnDevice(device))
                {
                    TrafficControlHelper().Uninstall(device);
                }
            }
        }
    }

    void ScheduleUdp()
    {
        for (uint32_t i = 0; i < SENDERS; ++i)
        {
            auto socket = Socket::CreateSocket(m_senders.Get(i), UdpSocketFactory::GetTypeId());
            socket->Bind();
            m_sockets.push_back(socket);
        }
        for (uint32_t i = 0; i < RECEIVERS; ++i)
        {
            auto socket = Socket::CreateSocket(m_receivers.Get(i), UdpSocketFactory::GetTypeId());
            socket->Bind(InetSocketAddress(Ipv4Address::GetAny(), UDP_PORT));
            socket->SetRecvCallback(Callback<void, Ptr<Socket>>([this](Ptr<Socket> from) { Receive(from); }));
            m_sinks.push_back(socket);
        }
        for (uint32_t flow = 0; flow < m_flows.size(); ++flow)
        {
            const Flow& what = m_flows[flow];
            m_outcomes.push_back({std::vector<int64_t>(what.packets), std::vector<int64_t>(what.packets, LOST)});
            for (uint32_t number = 0; number < what.packets; ++number)
            {
                Simulator::Schedule(PicoSeconds(what.startPs + number * what.intervalPs),
                                    [this, flow, number] { Send({flow, number}); });
            }
        }
    }

    void Send(Mark mark)
    {
        const Flow& flow = m_flows[mark.flow];
        std::vector<uint8_t> payload(flow.linkBytes - UDP_OVERHEAD_BYTES);
        std::copy_n(reinterpret_cast<const uint8_t*>(&mark), sizeof mark, payload.begin());
        m_outcomes[mark.flow].sentPs[mark.number] = Simulator::Now().GetPicoSeconds();
        int sent = m_sockets[flow.sender]->SendTo(Create<Packet>(payload.data(), payload.size()),
                                                  0,
                                                  InetSocketAddress(m_destinations[flow.receiver], UDP_PORT));
        NS_ABORT_MSG_IF(sent != int(payload.size()), "a sender could not send");
    }

    void Receive(Ptr<Socket> socket)
    {
        while (Ptr<Packet> packet = socket->Recv())
        {
            Mark mark;
            packet->CopyData(reinterpret_cast<uint8_t*>(&mark), sizeof mark);
            Outcome& outcome = m_outcomes[mark.flow];
            int64_t now = Simulator::Now().GetPicoSeconds();
            outcome.latencyPs[mark.number] = now - outcome.sentPs[mark.number];
            outcome.lastDeliveryPs = now;
        }
    }

    // NewReno of RFC 6582 alone, as fanin has it: no SACK, no limited transmit, no delayed acknowledgements, no options
    // that lengthen a segment.
    void ScheduleTcp()
    {
        const uint32_t segmentBytes = TCP_LINK_BYTES - TCP_OVERHEAD_BYTES;
        const uint32_t windowMaxBytes = TCP_WINDOW_MAX_SEGMENTS * segmentBytes;
        Config::SetDefault("ns3::TcpSocketBase::Sack", BooleanValue(false));
        Config::SetDefault("ns3::TcpSocketBase::Timestamp", BooleanValue(false));
        Config::SetDefault("ns3::TcpSocketBase::LimitedTransmit", BooleanValue(false));
        Config::SetDefault("ns3::TcpSocketBase::MinRto", TimeValue(PicoSeconds(TCP_RTO_MIN_PS)));
        Config::SetDefault("ns3::TcpSocket::DelAckCount", UintegerValue(1));
        Config::SetDefault("ns3::TcpSocket::SegmentSize", UintegerValue(segmentBytes));
        Config::SetDefault("ns3::TcpSocket::InitialCwnd", UintegerValue(TCP_WINDOW_INITIAL_SEGMENTS));
        Config::SetDefault("ns3::TcpSocket::SndBufSize", UintegerValue(windowMaxBytes));
        Config::SetDefault("ns3::TcpSocket::RcvBufSize", UintegerValue(windowMaxBytes));
        for (auto& node : {m_senders.Get(0), m_senders.Get(1), m_receivers.Get(0)})
        {
            auto tcp = node->GetObject<TcpL4Protocol>();
            tcp->SetAttribute("SocketType", TypeIdValue(TcpNewReno::GetTypeId()));
            tcp->SetAttribute("RecoveryType", TypeIdValue(TcpClassicRecovery::GetTypeId()));
        }
        for (uint32_t i = 0; i < TCP_FLOWS; ++i)
        {
            uint16_t port = TCP_PORT + i;
            PacketSinkHelper sink("ns3::TcpSocketFactory", InetSocketAddress(Ipv4Address::GetAny(), port));
            m_tcpSinks.Add(sink.Install(m_receivers.Get(0)));
            BulkSendHelper source("ns3::TcpSocketFactory", InetSocketAddress(m_destinations[0], port));
            source.SetAttribute("SendSize", UintegerValue(segmentBytes));
            source.Install(m_senders.Get(i)).Start(PicoSeconds(TCP_START_PS + i * TCP_STAGGER_PS));
        }
        Simulator::Schedule(PicoSeconds(TCP_START_PS), [this] {
            m_udpPorts = {{"trunk", m_trunk}, {"receiver0", m_receiverPorts[0]}, {"receiver1", m_receiverPorts[1]}};
        });
        Simulator::Stop(PicoSeconds(TCP_END_PS));
    }

    void PrintScenario() const;
    void PrintFlow(const Flow& flow, const Outcome& outcome, const char* end) const;

    std::vector<Flow> m_flows;
    std::vector<Outcome> m_outcomes;
    NodeContainer m_senders;
    NodeContainer m_receivers;
    Ipv4AddressHelper m_addresses;
    std::vector<Ipv4Address> m_destinations;
    std::vector<Ptr<Socket>> m_sockets;
    std::vector<Ptr<Socket>> m_sinks;
    ApplicationContainer m_tcpSinks;
    Port m_trunk;
    Port m_receiverPorts[RECEIVERS];
    std::vector<std::pair<const char*, Port>> m_udpPorts; // as they were before TCP
};

// FNV-1a over the latencies of a flow's packets, 8 little-endian bytes each: two simulators that agree on it agree on the
// fate of every single packet.
uint64_t
Digest(const std::vector<int64_t>& latencies)
{
    uint64_t digest = 0xcbf29ce484222325;
    for (int64_t latency : latencies)
    {
        for (int byte = 0; byte < 8; ++byte)
        {
            digest = (digest ^ ((uint64_t(latency) >> (8 * byte)) & 0xff)) * 0x100000001b3;
        }
    }
    return digest;
}

void
World::PrintScenario() const
{
    std::printf("  \"network\": {\"senders\": %u, \"receivers\": %u, \"delay_ps\": %" PRIu64 ",\n",
                SENDERS,
                RECEIVERS,
                DELAY_PS);
    std::printf("    \"sender_bps\": %" PRIu64 ", \"trunk_bps\": %" PRIu64 ", \"receiver_bps\": %" PRIu64 ",\n",
                SENDER_BPS,
                TRUNK_BPS,
                RECEIVER_BPS);
    std::printf("    \"trunk_queue_bytes\": %u, \"receiver_queue_bytes\": %u},\n",
                TRUNK_QUEUE_BYTES,
                RECEIVER_QUEUE_BYTES);
}

void
World::PrintFlow(const Flow& flow, const Outcome& outcome, const char* end) const
{
    std::vector<int64_t> delivered;
    std::copy_if(outcome.latencyPs.begin(),
                 outcome.latencyPs.end(),
                 std::back_inserter(delivered),
                 [](int64_t latency) { return latency != LOST; });
    std::sort(delivered.begin(), delivered.end());
    int64_t sum = 0;
    for (int64_t latency : delivered)
    {
        sum += latency;
    }
    // The smallest latency that so many per cent of the delivered packets do not exceed.
    auto percentile = [&](size_t percent) { return delivered[(delivered.size() * percent + 99) / 100 - 1]; };
    std::printf("    {\"sender\": %u, \"receiver\": %u, \"start_ps\": %" PRIu64 ", \"interval_ps\": %" PRIu64
                ", \"packets\": %u, \"link_bytes\": %u,\n",
                flow.sender,
                flow.receiver,
                flow.startPs,
                flow.intervalPs,
                flow.packets,
                flow.linkBytes);
    std::printf("     \"delivered\": %zu, \"latency_sum_ps\": %" PRId64 ", \"latency_min_ps\": %" PRId64
                ", \"latency_p50_ps\": %" PRId64 ",\n     \"latency_p99_ps\": %" PRId64 ", \"latency_max_ps\": %" PRId64
                ", \"last_delivery_ps\": %" PRId64 ", \"digest\": \"%016" PRIx64 "\"}%s\n",
                delivered.size(),
                sum,
                delivered.front(),
                percentile(50),
                percentile(99),
                delivered.back(),
                outcome.lastDeliveryPs,
                Digest(outcome.latencyPs),
                end);
}

void
World::Print() const
{
    std::printf("{\n  \"simulator\": \"ns-3 %s\",\n", NS3_VERSION);
    PrintScenario();
    std::printf("  \"flows\": [\n");
    for (size_t i = 0; i < m_flows.size(); ++i)
    {
        PrintFlow(m_flows[i], m_outcomes[i], i + 1 < m_flows.size() ? "," : "");
    }
    std::printf("  ],\n  \"ports\": [\n");
    for (size_t i = 0; i < m_udpPorts.size(); ++i)
    {
        const auto& [name, port] = m_udpPorts[i];
        std::printf("    {\"port\": \"%s\", \"dropped\": %" PRIu64 ", \"queue_bytes_max\": %" PRIu64
                    ", \"ties\": %" PRIu64 "}%s\n",
                    name,
                    port.dropped,
                    port.queueBytesMax,
                    port.ties,
                    i + 1 < m_udpPorts.size() ? "," : "");
    }
    std::printf("  ],\n  \"tcp\": {\"start_ps\": %" PRIu64 ", \"stagger_ps\": %" PRIu64 ", \"end_ps\": %" PRIu64
                ", \"link_bytes\": %u,\n    \"window_initial_segments\": %u, \"window_max_segments\": %u, \"rto_min_ps\": %" PRIu64
                ",\n    \"delivered_segments\": [",
                TCP_START_PS,
                TCP_STAGGER_PS,
                TCP_END_PS,
                TCP_LINK_BYTES,
                TCP_WINDOW_INITIAL_SEGMENTS,
                TCP_WINDOW_MAX_SEGMENTS,
                TCP_RTO_MIN_PS);
    for (uint32_t i = 0; i < TCP_FLOWS; ++i)
    {
        uint64_t bytes = DynamicCast<PacketSink>(m_tcpSinks.Get(i))->GetTotalRx();
        std::printf("%s%" PRIu64, i ? ", " : "", bytes / (TCP_LINK_BYTES - TCP_OVERHEAD_BYTES));
    }
    std::printf("], \"dropped\": %" PRIu64 "}\n}\n", m_receiverPorts[0].dropped - m_udpPorts[1].second.dropped);
}

} // namespace

int
main(int argc, char* argv[])
{
    CommandLine(__FILE__).Parse(argc, argv);
    Time::SetResolution(Time::PS);
    World world;
    Simulator::Run();
    world.Print();
    Simulator::Destroy();
}
