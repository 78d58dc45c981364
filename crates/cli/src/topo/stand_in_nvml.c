/* NVIDIA's management library as far as `fanin topo` asks it, for tests: nvml.h of CUDA 12 has these names, numbers and layouts. */
#include <stdio.h>
#include <string.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, DRIVER_NOT_LOADED = 9 };
enum { SPEED_MBPS_COMMON = 90, UNSIGNED_INT = 1 };

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} Pci;

typedef struct {
    unsigned field_id, scope_id;
    long long timestamp, latency;
    int value_type, status;
    union {
        double d;
        unsigned u;
        unsigned long long ull;
    } value;
} Field;

static const Pci PLACES[] = {{.bus = 0x3b}, {.domain = 1, .bus = 0x86}, {.bus = 0xc1}};

static void tell(Pci *pci, int place) {
    *pci = PLACES[place];
    snprintf(pci->bus_id, sizeof pci->bus_id, "%08x:%02x:%02x.0", pci->domain, pci->bus, pci->device);
}

int nvmlInit_v2(void) {
#ifdef NO_DRIVER
    return DRIVER_NOT_LOADED;
#endif
    return OK;
}

int nvmlShutdown(void) { return OK; }

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    return snprintf(version, length, "570.1") < 0 ? INVALID_ARGUMENT : OK;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 2;
    return OK;
}

/* A handle is the GPU's number and one, as it may not be null. */
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(unsigned long)(index + 1);
    return OK;
}

static int number_of(void *device) { return (int)(unsigned long)device - 1; }

int nvmlDeviceGetPciInfo_v3(void *device, Pci *pci) {
    tell(pci, number_of(device));
    return OK;
}

int nvmlDeviceGetNvLinkState(void *device, unsigned link, int *active) {
    (void)device;
#ifdef NO_LINKS
    return NOT_SUPPORTED;
#endif
    if (link >= 4)
        return INVALID_ARGUMENT;
    *active = link != 2;
    return OK;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, Pci *pci) {
    tell(pci, link == 3 ? 2 : 1 - number_of(device));
    return OK;
}

int nvmlDeviceGetFieldValues(void *device, int count, Field *fields) {
    (void)device;
    if (count != 1 || fields->field_id != SPEED_MBPS_COMMON)
        return INVALID_ARGUMENT;
    fields->value_type = UNSIGNED_INT;
#ifdef NO_RATE
    fields->value.u = 0;
#else
    fields->value.u = 25781;
#endif
    fields->status = OK;
    return OK;
}
