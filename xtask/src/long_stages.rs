//! What the long stages of `cargo xtask test --all` run, where that is cargo commands and programs in order.

use crate::stages::{Step, WGPU};
use crate::tools;

/// Programs as users build them. All that they share with the tests is compiled again, optimised.
#[rustfmt::skip]
pub(crate) const RELEASE_STAGE: &[Step] = &[
    Step::Cargo(&["build", "--release"]),
    Step::Cargo(&["test", "--release", "-p", "weftgrad-examples", "--test", "smoke"]),
    Step::Cargo(&["run", "--release", "--bin", "golden", "--", "conformance/goldens"]),
    // Closures in kernels that are not inlined are compiled without vectors (`runtime-cpu/src/simd/mod.rs`).
    Step::Symbols("golden", "7generic", "28_$u7b$$u7b$closure"),
    Step::Cargo(&["run", "--release", "--bin", "soak", "--", "--seeds", "40"]),
];

/// Both selections of packages, that of the tests and that of the programs, use the same features of their common
/// dependencies: built one by one, all of it was compiled twice.
#[rustfmt::skip]
pub(crate) const WGPU_STAGE: &[Step] = &[
    Step::Cargo(&[
        "test", "-p", WGPU, "-p", "weftgrad-examples", "--features", "weftgrad-examples/wgpu", "--lib", "--test", "*",
    ]),
    Step::Cargo(&["test", "-p", WGPU, "-p", "weftgrad-examples", "--features", "weftgrad-examples/wgpu", "--doc"]),
    Step::Cargo(&[
        "build", "-p", "weftgrad-conformance", "-p", "weftgrad-examples",
        "--features", "weftgrad-conformance/wgpu,weftgrad-examples/wgpu", "--bin", "golden", "--bin", "mlp", "--bin", "ddp",
    ]),
    Step::Built("golden", &["conformance/goldens", "--device", "wgpu"]),
    Step::Built("mlp", &["--device", "wgpu"]),
    Step::Built("ddp", &["--device", "wgpu", "--ranks", "2", "--steps", "2"]),
];

const DATA: &str = "weftgrad-data";
const MODELS: &str = "weftgrad-models";
const TRAIN: &str = "weftgrad-train";
const WATCH: &str = "weftgrad-watch";

/// Formats, and the screen of runs, behind features, which no other stage compiles.
#[rustfmt::skip]
pub(crate) const FORMATS_STAGE: &[Step] = &[
    Step::Cargo(&["clippy", "-p", DATA, "--all-features", "--all-targets", "--", "-D", "warnings"]),
    Step::Cargo(&["test", "-p", DATA, "--all-features", "--lib", "--tests"]),
    Step::Cargo(&["test", "-p", DATA, "--all-features", "--doc"]),
    Step::Cargo(&["clippy", "-p", MODELS, "--features", "hub,text", "--all-targets", "--", "-D", "warnings"]),
    Step::Cargo(&["test", "-p", MODELS, "--features", "hub,text", "--lib", "--tests"]),
    Step::Cargo(&["clippy", "-p", WATCH, "--features", "terminal", "--all-targets", "--", "-D", "warnings"]),
    Step::Cargo(&["test", "-p", WATCH, "--features", "terminal", "--lib", "--test", "program"]),
    Step::Cargo(&["clippy", "-p", TRAIN, "--features", "program", "--all-targets", "--", "-D", "warnings"]),
    Step::Cargo(&["test", "-p", TRAIN, "--features", "program", "--test", "all", "--", "the_program_asks"]),
    Step::Cargo(&["test", "-p", TRAIN, "--features", "program", "--test", "search", "--", "the_program"]),
    Step::Cargo(&["test", "-p", "weftgrad", "--features", "full", "--doc", "book::chat"]),
    Step::Cargo(&["test", "-p", "weftgrad-examples", "--features", "text", "--test", "smoke", "finetune_and_generate"]),
    Step::Cargo(&["run", "-p", "weftgrad-models-export", "--example", "exported", "--", "target/exported"]),
    Step::Python(tools::FORMATS, &["models-export/tests/exported/read.py", "target/exported"]),
];

/// What `distributed` does on other engines, over NCCL on the host.
pub(crate) const NCCL_STAGE: &[Step] = &[
    Step::Cargo(&["test", "-p", "weftgrad-engine-nccl", "--features", "weftgrad-engine-nccl/emulate-all"]),
    Step::Cargo(&["clippy", "-p", "weftgrad-examples", "--features", "weftgrad-examples/nccl", "--", "-D", "warnings"]),
];

/// The target is named, so that build scripts and procedural macros are compiled without the sanitizer. The pinned
/// compiler has it behind the switch that makes it take unstable options.
#[rustfmt::skip]
pub(crate) const ASAN_STAGE: &[Step] = &[Step::CargoWith(
    &[
        ("RUSTC_BOOTSTRAP", "1"), ("RUSTFLAGS", "-Zsanitizer=address"), ("CARGO_TARGET_DIR", "target/asan"),
        // Memory that no machine has is an error of ours, which `misuse` asks for.
        ("ASAN_OPTIONS", "allocator_may_return_null=1"),
    ],
    &[
        "test", "--target", "x86_64-unknown-linux-gnu", "-p", "weftgrad-conformance", "--test", "cpu", "--",
        "misuse", "views", "repeated", "slots", "empty", "geometry", "kernels", "sizes",
    ],
)];

/// Leaks are not looked for: worker threads and tables live as long as the process.
#[rustfmt::skip]
pub(crate) const VALGRIND_STAGE: &[Step] = &[Step::CargoWith(
    &[
        ("WEFTGRAD_MAX_CPU_ISA", "avx2"),
        ("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER", "valgrind --quiet --error-exitcode=9 --leak-check=no"),
    ],
    &["test", "-p", "weftgrad-conformance", "--test", "cpu", "--", "misuse", "repeated", "empty"],
)];

#[rustfmt::skip]
pub(crate) const KILLS_STAGE: &[Step] = &[
    Step::CargoWith(
        &[("WEFTGRAD_TEST_TRAIN_SEEDS", "200")],
        &["test", "-p", "weftgrad-train", "--test", "all", "kills"],
    ),
    Step::CargoWith(
        &[("WEFTGRAD_TEST_FAULTS_SEEDS", "50")],
        &["test", "-p", "weftgrad-train", "--test", "all", "faults"],
    ),
];

#[rustfmt::skip]
pub(crate) const TORCH_STAGE: &[Step] = &[
    Step::Python(tools::TORCH, &["conformance/against/torch_cases.py", "target/against", "--count", "20000"]),
    Step::Cargo(&["run", "--release", "-p", "weftgrad-conformance", "--bin", "golden", "--", "target/against", "--views"]),
];

/// Models with real weights, beside transformers: the same numbers, and how long each takes.
#[rustfmt::skip]
pub(crate) const REAL_STAGE: &[Step] = &[
    Step::Cargo(&["build", "--release", "-p", MODELS, "--features", "hub,text", "--examples"]),
    Step::Python(tools::REAL, &["conformance/against/real_models.py", "target/real-models"]),
    Step::Cargo(&["run", "--release", "-p", MODELS, "--features", "hub,text", "--example", "real_models", "--", "target/real-models"]),
    Step::Cargo(&["run", "--release", "-p", MODELS, "--features", "hub,text", "--example", "real_training", "--", "target/real-models"]),
    Step::Cargo(&["run", "--release", "-p", MODELS, "--features", "hub,text", "--example", "real_dpo", "--", "target/real-models"]),
    Step::Cargo(&["run", "--release", "-p", MODELS, "--features", "hub,text", "--example", "real_grpo", "--", "target/real-models"]),
    Step::Cargo(&["run", "--release", "-p", MODELS, "--features", "hub,text", "--example", "real_onnx", "--", "target/real-models"]),
    Step::Python(tools::REAL, &["conformance/against/real_onnx.py", "target/real-models"]),
];

/// The node tests of ONNX's backend suite, by the package itself.
#[rustfmt::skip]
pub(crate) const ONNX_STAGE: &[Step] = &[
    Step::Python(tools::FORMATS, &["conformance/against/onnx_cases.py", "target/onnx-cases.zlib"]),
    Step::CargoWith(
        &[("WEFTGRAD_TEST_ONNX_FILE", "target/onnx-cases.zlib")],
        &["test", "-p", "weftgrad-conformance", "--test", "onnx"],
    ),
];

#[rustfmt::skip]
pub(crate) const MALFORMED_STAGE: &[Step] = &[Step::CargoWith(
    &[("WEFTGRAD_TEST_MUTATIONS", "1000000")],
    &["test", "--release", "-p", "weftgrad-examples", "--test", "malformed_files"],
)];

pub(crate) const SOAK_STAGE: &[Step] = &[
    Step::Cargo(&["run", "--release", "--bin", "soak", "--", "--seeds", "4000"]),
    Step::CargoWith(&[("WEFTGRAD_TEST_ALL_CASES", "1")], &["test", "-p", "weftgrad-distributed", "--test", "all"]),
];
