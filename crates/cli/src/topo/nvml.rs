//! NVLinks, as NVIDIA's management library has them: sysfs knows nothing of them.

use std::collections::BTreeMap;
use std::ffi::OsStr;

use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::PciInfo;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id::NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON;
use nvml_wrapper::{Device, Nvml};

/// The file of the driver's library on Linux; loaded when it is asked. If there is none there are
/// no NVLinks.
pub(super) const LIBRARY: &str = "libnvidia-ml.so.1";

/// Links that a GPU has at most: `NVML_NVLINK_MAX_LINKS` of nvml.h.
const LINKS_MAX: u32 = 18;

/// A GPU and its links.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Gpu {
    /// As sysfs writes it: `0000:3b:00.0`.
    pub(super) address: String,
    /// At the other end of each link that works. A peer that is no GPU is an NVSwitch; so would be
    /// IBM's POWER processors, which have NVLinks.
    pub(super) others: Vec<String>,
    /// Bits a second of each link, in each direction.
    pub(super) rate_bps: f64,
}

/// Between GPUs: bits a second in each direction, of all links between two together, once.
pub(super) type Pairs = BTreeMap<(String, String), f64>;

/// The GPUs of this machine, as NVML knows them.
pub(super) fn read(library: &OsStr) -> Result<Vec<Gpu>, NvmlError> {
    let nvml = Nvml::builder().lib_path(library).init()?;
    (0..nvml.device_count()?).map(|index| gpu(&nvml.device_by_index(index)?)).collect()
}

/// Links between GPUs, and what each GPU's links to switches carry. `known` are GPUs that NVML may
/// not show, as in a container.
pub(super) fn joined(gpus: &[Gpu], known: &[String]) -> (Pairs, BTreeMap<String, f64>) {
    let (mut told, mut to_switches) = (Pairs::new(), BTreeMap::new());
    for Gpu { address, others, rate_bps } in gpus {
        for other in others {
            if known.contains(other) || gpus.iter().any(|gpu| gpu.address == *other) {
                *told.entry((address.clone(), other.clone())).or_default() += rate_bps;
            } else {
                *to_switches.entry(address.clone()).or_default() += rate_bps;
            }
        }
    }
    // Each end tells of a link, if NVML shows it.
    let mut pairs = Pairs::new();
    for ((one, other), bps) in told {
        let pair = if one < other { (one, other) } else { (other, one) };
        let both = pairs.entry(pair).or_insert(bps);
        *both = both.max(bps);
    }
    (pairs, to_switches)
}

fn gpu(device: &Device<'_>) -> Result<Gpu, NvmlError> {
    let mut others = Vec::new();
    for number in 0..LINKS_MAX {
        let link = device.link_wrapper_for(number);
        match link.is_active() {
            // The wrapper's own `remote_device_type` says of each that it is unknown.
            Ok(true) => others.push(address(&link.remote_pci_info()?)),
            Ok(false) | Err(NvmlError::InvalidArg | NvmlError::NotSupported) => {}
            Err(error) => return Err(error),
        }
    }
    let rate_bps = if others.is_empty() { 0.0 } else { rate_bps(device)? };
    Ok(Gpu { address: address(&device.pci_info()?), others, rate_bps })
}

/// The rate of one link, in each direction: NVML counts megabytes a second.
fn rate_bps(device: &Device<'_>) -> Result<f64, NvmlError> {
    let mut values = device.field_values_for(&[FieldId(NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON)])?;
    let megabytes = match values.pop().ok_or(NvmlError::UnexpectedVariant(0))??.value? {
        SampleValue::F64(value) => value,
        SampleValue::U32(value) => f64::from(value),
        SampleValue::U64(value) => value as f64,
        SampleValue::I64(value) => value as f64,
    };
    if megabytes > 0.0 { Ok(megabytes * 8e6) } else { Err(NvmlError::NotSupported) }
}

fn address(pci: &PciInfo) -> String {
    format!("{:04x}:{:02x}:{:02x}.0", pci.domain, pci.bus, pci.device)
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use super::*;

    fn gpu(number: u32, others: &[&str]) -> Gpu {
        let others = others.iter().map(|other| (*other).to_owned()).collect();
        Gpu { address: format!("0000:0{number}:00.0"), others, rate_bps: 200e9 }
    }

    #[test]
    fn a_link_is_seen_from_both_ends_and_counts_once_and_several_add_up() {
        let (one, two) = ("0000:01:00.0", "0000:02:00.0");
        let (pairs, to_switches) =
            joined(&[gpu(1, &[two, two, "0000:c1:00.0"]), gpu(2, &[one, one]), gpu(3, &[])], &[]);
        assert_eq!(pairs, BTreeMap::from([((one.into(), two.into()), 400e9)]));
        assert_eq!(to_switches, BTreeMap::from([(one.into(), 200e9)]));
    }

    #[test]
    fn a_gpu_that_nvml_does_not_show_is_no_switch() {
        let (one, two) = ("0000:01:00.0", "0000:02:00.0");
        let (pairs, to_switches) = joined(&[gpu(2, &[one])], &[one.into(), two.into()]);
        assert_eq!(pairs, BTreeMap::from([((one.into(), two.into()), 200e9)]));
        assert_eq!(to_switches, BTreeMap::new());
    }

    /// A stand-in for NVIDIA's library, for a made-up machine. `cc` compiles it, and it is gone
    /// when the test ends.
    struct Library(tempfile::TempDir);

    impl Library {
        fn new(machine: &str) -> Self {
            let folder = tempfile::tempdir().expect("a folder");
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/topo/stand_in_nvml.c");
            let compiled = Command::new("cc")
                .args(["-shared", "-fPIC", "-Wall", "-Werror", &format!("-D{machine}"), "-o"])
                .arg(folder.path().join(LIBRARY))
                .arg(source)
                .status();
            assert!(compiled.expect("cc").success());
            Self(folder)
        }

        fn read(&self) -> Result<Vec<Gpu>, NvmlError> {
            read(self.0.path().join(LIBRARY).as_os_str())
        }
    }

    #[test]
    fn links_that_work_are_read_with_their_rate_and_far_end() {
        let gpus = Library::new("TWO_GPUS").read().expect("read");
        let rate_bps = 25_781.0 * 8e6;
        let far = |others: &[&str]| others.iter().map(|other| (*other).to_owned()).collect::<Vec<_>>();
        assert_eq!(
            gpus,
            [
                // The third of four links does not work, and the last goes to a switch.
                Gpu {
                    address: "0000:3b:00.0".into(),
                    others: far(&["0001:86:00.0", "0001:86:00.0", "0000:c1:00.0"]),
                    rate_bps
                },
                Gpu {
                    address: "0001:86:00.0".into(),
                    others: far(&["0000:3b:00.0", "0000:3b:00.0", "0000:c1:00.0"]),
                    rate_bps
                },
            ]
        );
    }

    #[test]
    fn gpus_without_nvlinks_have_none() {
        let gpus = Library::new("NO_LINKS").read().expect("read");
        assert_eq!(gpus.iter().map(|gpu| gpu.others.len()).collect::<Vec<_>>(), [0, 0]);
    }

    #[test]
    fn a_rate_of_nothing_is_an_error() {
        assert_eq!(
            Library::new("NO_RATE").read().expect_err("no rate").to_string(),
            NvmlError::NotSupported.to_string()
        );
    }

    #[test]
    fn without_a_library_or_a_driver_the_error_says_so() {
        let error = read(OsStr::new("/nowhere/libnvidia-ml.so.1")).expect_err("no library");
        assert!(error.to_string().contains("libloading"), "{error}");
        let error = Library::new("NO_DRIVER").read().expect_err("no driver");
        assert!(error.to_string().contains("driver"), "{error}");
    }
}
