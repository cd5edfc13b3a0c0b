//! The changes of kernels on GPUs that a test must notice.

use super::Mutant;

const ON_WEBGPU: &[&str] = &["test", "-p", "weftgrad-runtime-wgpu", "--lib", "attention"];
const ON_SUBGROUPS: &[&str] = &["test", "-p", "weftgrad-runtime-wgpu", "--lib", "same_bits"];

#[rustfmt::skip]
pub(super) const OF_KERNELS: &[Mutant] = &[
    Mutant { file: "runtime-wgpu/src/fused/attention/backward.rs", from: "p{j} * (d{j} - dot)", to: "p{j} * d{j}", test: ON_WEBGPU },
    Mutant { file: "runtime-wgpu/src/fused/attention/backward.rs", from: "at_a_time(this.queries, this.keys)", to: "this.queries * this.keys", test: ON_WEBGPU },
    Mutant { file: "runtime-wgpu/src/fused/attention/backward.rs", from: "select(base, wg_bits(0x7f800000u), bitcast<u32>(base) == 0xff800000u)", to: "base", test: ON_WEBGPU },
    Mutant { file: "runtime-wgpu/src/fused/attention/backward.rs", from: "sum{j} += out1", to: "sum{j} = out1", test: ON_WEBGPU },
    Mutant { file: "runtime-wgpu/src/fused/attention/learned.rs", from: "sum{k} += out", to: "sum{k} = out", test: ON_WEBGPU },
    Mutant { file: "runtime-wgpu/src/fused/attention/mod.rs", from: "Bindings::count(outs)", to: "0", test: ON_WEBGPU },
    Mutant { file: "runtime-wgpu/src/fused/attention/mod.rs", from: "groups.min(start + each)", to: "groups.min(start + each - 1)", test: ON_WEBGPU },
    Mutant { file: "runtime-wgpu/src/fused/rows.rs", from: "Some(half / 2)).take_while", to: "Some(half / 2)).skip(1).take_while", test: ON_SUBGROUPS },
    Mutant { file: "runtime-wgpu/src/matmul/subgroups.rs", from: "min({lanes}u, {k} - depth)", to: "min({lanes}u, {k})", test: ON_SUBGROUPS },
];
