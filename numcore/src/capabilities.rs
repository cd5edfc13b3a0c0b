//! Capabilities of a device, and the Markdown table that compares devices.

use crate::DType;

/// The capabilities of one device: dtypes, memory and parallelism.
#[derive(Clone, Debug)]
pub struct Capabilities {
    /// A description of the device, for tables and messages.
    pub name: String,
    /// Element types the device can store.
    pub storage: Vec<DType>,
    /// Element types the device computes in. Half-precision types that are only stored are computed in `f32`.
    pub compute: Vec<DType>,
    /// Worker threads or multiprocessors that share one kernel.
    pub parallelism: usize,
    /// The largest size of one operand, in bytes.
    pub max_binding: usize,
    /// Bytes of temporary memory for one piece of an operation that works in pieces: the logits of
    /// [`LinearCrossEntropy`](crate::fused::LinearCrossEntropy). A constant of the runtime, not of the device, since
    /// sums depend on how many pieces there are.
    pub piece: usize,
}

impl Capabilities {
    /// A Markdown table that compares devices: one column per device, headed by the name given here.
    ///
    /// ```
    /// use numcore::{Capabilities, NullRuntime, Runtime};
    /// let table = Capabilities::table(&[("Null", NullRuntime::new().capabilities())]);
    /// assert!(table.contains("| `f64` | computed in |"), "{table}");
    /// ```
    pub fn table(devices: &[(&str, &Capabilities)]) -> String {
        let mut table = String::new();
        let mut row = |head: &str, cell: &dyn Fn(&str, &Capabilities) -> String| {
            let cells: String = devices.iter().map(|(name, device)| format!(" {} |", cell(name, device))).collect();
            table.push_str(&format!("| {head} |{cells}\n"));
        };
        row("", &|name, _| name.into());
        row("---", &|_, _| "---".into());
        row("device", &|_, device| device.name.clone());
        for dtype in DType::ALL {
            row(&format!("`{dtype}`"), &|_, device| device.how(dtype).into());
        }
        row("threads or processors of a kernel", &|_, device| device.parallelism.to_string());
        row("the most bytes of one operand", &|_, device| bytes(device.max_binding));
        table
    }

    /// The support of `dtype` by the device, in words.
    fn how(&self, dtype: DType) -> &'static str {
        match (self.storage.contains(&dtype), self.compute.contains(&dtype)) {
            (true, true) => "computed in",
            (true, false) if dtype.is_half() && self.compute.contains(&DType::F32) => "stored, computed in `f32`",
            (true, false) => "stored and moved; arithmetic is refused",
            (false, _) => "refused",
        }
    }
}

fn bytes(n: usize) -> String {
    match n {
        _ if n >= isize::MAX as usize => "the memory".into(),
        _ if n >= 1 << 30 => format!("{:.1} GiB", n as f64 / (1u64 << 30) as f64),
        _ => format!("{:.1} MiB", n as f64 / (1 << 20) as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(name: &str, compute: &[DType], max_binding: usize) -> Capabilities {
        let storage = DType::ALL.iter().copied().filter(|d| *d != DType::U8).collect();
        Capabilities {
            name: name.into(),
            storage,
            compute: compute.to_vec(),
            parallelism: 3,
            max_binding,
            piece: 1 << 20,
        }
    }

    #[test]
    fn a_column_for_each_device() {
        let (a, b) = (device("one", &[DType::F32, DType::F64], usize::MAX), device("two", &[DType::F32], 128 << 20));
        let table = Capabilities::table(&[("A", &a), ("B", &b)]);
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines[..3], ["|  | A | B |", "| --- | --- | --- |", "| device | one | two |"]);
        for row in [
            "| `f64` | computed in | stored and moved; arithmetic is refused |",
            "| `bf16` | stored, computed in `f32` | stored, computed in `f32` |",
            "| `u8` | refused | refused |",
            "| the most bytes of one operand | the memory | 128.0 MiB |",
        ] {
            assert!(lines.contains(&row), "{row} is not in\n{table}");
        }
    }
}
