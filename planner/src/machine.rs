//! Machines: the speeds and sizes that costs are divided by.

use numcore::{Error, KernelWork, Result};
use serde::{Deserialize, Serialize};

/// A machine of many ranks, each with a device of its own. Its text is TOML; [`Machine::named`] has some.
///
/// Seven numbers make times out of costs: two of a device, one of its kernels, and two of each link. Those of named
/// GPUs are the vendor's peaks times [`FITTED_SHARES`], with no latencies and no time of a kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// The name in reports.
    pub name: String,
    /// The number of ranks whose traffic goes over `node`; traffic of larger groups goes over `network`.
    pub ranks_per_node: usize,
    /// The bytes of memory of a rank.
    pub memory: f64,
    /// Floating-point operations per second of products, at the vendor's peak. Utilizations are shares of it.
    pub peak_flops: f64,
    /// Floating-point operations per second that products reach.
    pub flops: f64,
    /// Bytes per second of memory that kernels reach.
    pub memory_bandwidth: f64,
    /// Seconds that a kernel takes beside its work.
    #[serde(default)]
    pub kernel_seconds: f64,
    /// The link of ranks of one node.
    pub node: LinkSpeed,
    /// The link of a rank to other nodes.
    pub network: LinkSpeed,
    /// True if a transfer between two pipeline ranks holds both of them up.
    #[serde(default)]
    pub blocking_transfers: bool,
    /// True if exchanges of gradients wait for the last backward pass.
    #[serde(default)]
    pub late_gradients: bool,
    /// True if backward recomputes cheap values on this device, as on a CPU; GPUs keep them.
    #[serde(default)]
    pub recomputes: bool,
}

/// The speed of a link, one way.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkSpeed {
    /// Seconds of a call, however little it moves.
    pub latency: f64,
    /// Bytes per second.
    pub bandwidth: f64,
}

impl LinkSpeed {
    /// The seconds of `calls` calls that move `bytes` in all, one after another.
    pub fn seconds(&self, calls: f64, bytes: f64) -> f64 {
        calls * self.latency + bytes / self.bandwidth
    }
}

/// Shares of the vendor's peaks that training reaches: of products, of memory, of the link in a node, and of the
/// network. They are fitted on the eight runs of Korthikanti et al. 2022 (tables 4 and 5) with Megatron-LM on A100s
/// alone. No share may exceed 1. These four are all fitted constants of an [`Estimate`](crate::Estimate).
pub const FITTED_SHARES: [f64; 4] = [0.868, 1.0, 0.397, 0.262];

impl Machine {
    /// A GPU by its vendor's numbers. They are TFLOP/s in half precision, GB/s and GB of memory. The others are GB/s of
    /// the link in a node and of the network for each GPU, one way.
    fn gpu(name: &str, tflops: f64, memory: [f64; 2], links: [f64; 2]) -> Self {
        let [flops, bandwidth, node, network] = FITTED_SHARES;
        Machine {
            name: name.into(),
            ranks_per_node: 8,
            memory: memory[1] * 1e9,
            peak_flops: tflops * 1e12,
            flops: tflops * 1e12 * flops,
            memory_bandwidth: memory[0] * 1e9 * bandwidth,
            kernel_seconds: 0.0,
            node: LinkSpeed { latency: 0.0, bandwidth: links[0] * 1e9 * node },
            network: LinkSpeed { latency: 0.0, bandwidth: links[1] * 1e9 * network },
            blocking_transfers: false,
            late_gradients: false,
            recomputes: false,
        }
    }

    /// NVIDIA's A100 of 80 GB, eight in a node, with a network of 200 Gb/s for each.
    pub fn a100() -> Self {
        Self::gpu("A100", 312.0, [2039.0, 85.9], [300.0, 25.0])
    }

    /// A machine by name: `V100`, `A100`, `H100`, `H200`, `H800` or `B200`.
    ///
    /// # Errors
    /// Fails for another name, and lists these.
    pub fn named(name: &str) -> Result<Self> {
        let all = [
            Self::gpu("V100", 125.0, [900.0, 34.4], [150.0, 12.5]),
            Self::a100(),
            Self::gpu("H100", 989.0, [3350.0, 85.9], [450.0, 50.0]),
            Self::gpu("H200", 989.0, [4800.0, 151.0], [450.0, 50.0]),
            Self::gpu("H800", 989.0, [3350.0, 85.9], [200.0, 50.0]),
            Self::gpu("B200", 2250.0, [8000.0, 206.0], [900.0, 50.0]),
        ];
        let names: Vec<String> = all.iter().map(|machine| machine.name.clone()).collect();
        let found = all.into_iter().find(|machine| machine.name.eq_ignore_ascii_case(name));
        let why = || format!("there is no `{name}`; there are {}, and any machine in TOML", names.join(", "));
        found.ok_or_else(|| Error::config("Machine", "name", why()))
    }

    /// Reads a machine.
    ///
    /// # Errors
    /// Fails for text that is no TOML, an unknown or missing field, and a speed that is not above 0.
    pub fn from_toml(text: &str) -> Result<Self> {
        let machine: Machine =
            toml::from_str(text).map_err(|why| Error::config("Machine", "machine", why.to_string()))?;
        machine.check()?;
        Ok(machine)
    }

    /// The text of the machine.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self).map_err(|why| Error::internal("Machine::to_toml", why.to_string()))
    }

    fn check(&self) -> Result<()> {
        let speeds = [
            ("memory", self.memory),
            ("peak_flops", self.peak_flops),
            ("flops", self.flops),
            ("memory_bandwidth", self.memory_bandwidth),
            ("node.bandwidth", self.node.bandwidth),
            ("network.bandwidth", self.network.bandwidth),
        ];
        let times = [
            ("kernel_seconds", self.kernel_seconds),
            ("node.latency", self.node.latency),
            ("network.latency", self.network.latency),
        ];
        let slow = speeds.into_iter().find(|(_, value)| value.is_nan() || *value <= 0.0);
        let negative = times.into_iter().find(|(_, value)| !value.is_finite() || *value < 0.0);
        if let Some((field, value)) = slow.or(negative) {
            let why = format!("`{field}` is {value}: speeds and sizes are above 0, and times at least 0");
            return Err(Error::config("Machine", field, why));
        }
        if self.ranks_per_node == 0 {
            return Err(Error::config("Machine", "ranks_per_node", "`ranks_per_node` is 0, and must be at least 1"));
        }
        Ok(())
    }

    /// This machine, of whose device a step takes `measured` seconds and not `estimated` ones. Give it a step of one's
    /// own model on one rank, whose kernels reach another share of the peaks than large products do.
    ///
    /// # Errors
    /// Fails for times that are not above 0.
    pub fn matched(self, estimated: f64, measured: f64) -> Result<Self> {
        let slower = measured / estimated;
        if !(estimated > 0.0 && slower > 0.0 && slower.is_finite()) {
            let why = format!("{measured} seconds in place of {estimated}: both must be above 0");
            return Err(Error::config("Machine::matched", "measured", why));
        }
        let (flops, memory_bandwidth) = (self.flops / slower, self.memory_bandwidth / slower);
        Ok(Machine { flops, memory_bandwidth, kernel_seconds: self.kernel_seconds * slower, ..self })
    }

    /// The seconds of kernels: products by the slower of arithmetic and memory, all others by memory.
    pub fn seconds(&self, work: &KernelWork) -> f64 {
        let products = (work.flops as f64 / self.flops).max(work.product_bytes as f64 / self.memory_bandwidth);
        products + work.bytes as f64 / self.memory_bandwidth + work.launches as f64 * self.kernel_seconds
    }

    /// The link of a group whose ranks are `span` apart from the first to the last, both included.
    pub fn link(&self, span: usize) -> &LinkSpeed {
        if span <= self.ranks_per_node { &self.node } else { &self.network }
    }
}
