//! Compiles kernel sources to host libraries, cached on disk.
//!
//! A compiler takes a quarter of a second to start and to compile the code common to all kernels, and a thirtieth for
//! each kernel. So kernels that are known beforehand ([`Listing`](super::Listing)) share a library, each in a namespace
//! of its own.

use std::{
    fmt::Write,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{self, Command},
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    thread,
};

use parking_lot::Mutex;

use super::super::{DriverFailure, Fallible};
use crate::{
    codegen::{KernelSource, PRELUDE},
    handwritten::HandwrittenKernel,
};

const EMULATOR: &str = include_str!("../../../kernels/shim/emulator.h");

/// Definitions that sources use in addition to the emulator's own.
const MORE: &str = r#"
#include <math.h>
#include <utility>
#define WG_EMULATED
#define __global__
#define __device__
#define __forceinline__ inline
inline u32 __umulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
template <class... A, size_t... I> void weft_call(void (*f)(A...), void** args, std::index_sequence<I...>) {
    f(*(std::remove_cv_t<A>*)args[I]...);
}
template <class... A> void weft_launch(void (*f)(A...), const u32* at, void** args, bool plain) {
    dim3 grid(at[0], at[1], at[2]), threads(at[3], at[4], 1);
    auto call = [&] { weft_call(f, args, std::index_sequence_for<A...>()); };
    if (!plain) return emulator::launch(at[6], grid, threads, at[5], call);
    gridDim = grid, blockDim = threads;
    for (u32 z = 0; z < grid.z; z++) for (u32 y = 0; y < grid.y; y++) for (u32 x = 0; x < grid.x; x++) {
        blockIdx = dim3(x, y, z);
        for (u32 j = 0; j < threads.y; j++) for (u32 i = 0; i < threads.x; i++) {
            threadIdx = dim3(i, j, 0);
            call();
        }
    }
}
"#;

/// Flags of g++. They forbid contraction to fused multiply-adds; `-fno-gnu-unique` gives every library its own
/// emulator.
const FLAGS: [&str; 8] =
    ["-std=c++20", "-O1", "-fPIC", "-shared", "-fno-gnu-unique", "-fno-strict-aliasing", "-ffp-contract=off", "-w"];

/// The most kernels of one library: few enough that every worker has some, and a mistake's message stays short.
const BATCH: usize = 32;

/// A folder of compiled kernels.
pub(crate) struct HostBuilder {
    folder: PathBuf,
    header: String,
}

/// Calls `work` with every item, on all processors. An item that fails does not keep the others from theirs; the last
/// failure is returned.
pub(crate) fn for_each<T: Sync>(items: &[T], work: impl Fn(&T) -> Fallible<()> + Sync) -> Fallible<()> {
    let workers = thread::available_parallelism().map_or(1, |n| n.get()).min(items.len());
    let (next, outcome) = (AtomicUsize::new(0), Mutex::new(Ok(())));
    let worker = || {
        while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            work(item).unwrap_or_else(|e| *outcome.lock() = Err(e));
        }
    };
    thread::scope(|scope| (0..workers).for_each(|_| drop(scope.spawn(worker))));
    outcome.into_inner()
}

impl HostBuilder {
    /// Creates the folder, and the precompiled header that all kernels include.
    pub(crate) fn new(folder: &Path) -> Fallible<HostBuilder> {
        // Include guards make the sources' own copies of it empty.
        let common = HandwrittenKernel::new("common.cuh", "", &[]).source().text;
        let header = format!("{EMULATOR}{MORE}{PRELUDE}{common}");
        // A folder per header: its precompiled form must be its own.
        let folder = folder.join(format!("{:016x}", hash(&header)));
        let builder = HostBuilder { folder, header };
        builder.prepare().map_err(|e| builder.io(&e))??;
        Ok(builder)
    }

    fn prepare(&self) -> io::Result<Fallible<()>> {
        fs::create_dir_all(&self.folder)?;
        let compiled = self.folder.join("weft.h.gch");
        if compiled.is_file() {
            return Ok(Ok(()));
        }
        let (written, part) = (self.unique("h"), self.unique("part"));
        fs::write(&written, &self.header)?;
        let flags = FLAGS.iter().filter(|f| **f != "-shared");
        let done = run(Command::new("g++").args(flags).args(["-x", "c++-header"]).arg(&written).arg("-o").arg(&part));
        if done.is_ok() {
            fs::rename(&written, self.folder.join("weft.h"))?;
            fs::rename(&part, &compiled)?;
        }
        Ok(done)
    }

    /// Returns the library that holds a kernel, compiled if it is new, and the kernel's symbol in it.
    pub(crate) fn library(&self, source: &KernelSource) -> Fallible<(PathBuf, String)> {
        let kernel = HostKernel::new(source);
        let path = self.place(&kernel);
        if !path.is_file() {
            self.compile(std::slice::from_ref(&kernel))?;
        }
        Ok((path, kernel.symbol()))
    }

    /// Compiles the kernels that are new, in batches, by as many workers as there are CPUs.
    pub(crate) fn compile_all(&self, sources: &[KernelSource]) -> Fallible<()> {
        let mut new: Vec<HostKernel> =
            sources.iter().map(HostKernel::new).filter(|k| !self.place(k).is_file()).collect();
        new.sort_by_key(|k| k.name);
        new.dedup_by_key(|k| k.name);
        let workers = thread::available_parallelism().map_or(1, |n| n.get());
        let batches: Vec<&[HostKernel]> = new.chunks(BATCH.min(new.len().div_ceil(workers)).max(1)).collect();
        for_each(&batches, |batch| self.compile(batch))
    }

    /// Compiles one library, named after its content, with a link to it by every kernel's name.
    fn compile(&self, kernels: &[HostKernel]) -> Fallible<()> {
        let mut text = String::from("#include \"weft.h\"\n");
        kernels.iter().for_each(|k| k.write(&mut text, &self.header));
        let (file, part) = (self.unique("cpp"), self.unique("part"));
        let library = self.folder.join(format!("{:016x}.library.so", hash(&text)));
        fs::write(&file, text).map_err(|e| self.io(&e))?;
        run(Command::new("g++").args(FLAGS).arg("-I").arg(&self.folder).arg(&file).arg("-o").arg(&part))?;
        let moved = fs::remove_file(&file).and_then(|()| fs::rename(&part, &library));
        moved.and_then(|()| kernels.iter().try_for_each(|k| self.link(k, &library))).map_err(|e| self.io(&e))
    }

    fn link(&self, kernel: &HostKernel, library: &Path) -> io::Result<()> {
        let part = self.unique("part");
        symlink(library.file_name().unwrap_or_default(), &part)?;
        fs::rename(part, self.place(kernel))
    }

    fn place(&self, kernel: &HostKernel) -> PathBuf {
        self.folder.join(format!("{:016x}.so", kernel.name))
    }

    /// A file name that no other builder, of this process or another, uses meanwhile.
    fn unique(&self, extension: &str) -> PathBuf {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        self.folder.join(format!("{}-{}.{extension}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed)))
    }

    fn io(&self, e: &io::Error) -> DriverFailure {
        DriverFailure::new(format!("{}: {e}", self.folder.display()))
    }
}

/// A kernel under a name that identifies its source and entry.
struct HostKernel<'a> {
    name: u64,
    source: &'a KernelSource,
}

impl<'a> HostKernel<'a> {
    fn new(source: &'a KernelSource) -> HostKernel<'a> {
        HostKernel { name: hash(&(&source.text, &source.entry)), source }
    }

    fn symbol(&self) -> String {
        format!("weft_{:016x}", self.name)
    }

    /// Writes the kernel's source in a namespace. Macros have no namespaces, so macros of the source are undefined
    /// after it.
    fn write(&self, to: &mut String, header: &str) {
        let KernelSource { text, entry, .. } = self.source;
        let own = text.strip_prefix(PRELUDE).unwrap_or(text).replace("extern \"C\" __global__", "static");
        let waits = ["__syncthreads", "_sync(", "mma_", "__shared__", "DYNAMIC_SHARED"];
        let plain = !waits.iter().any(|w| own.contains(w));
        let symbol = self.symbol();
        // Writing to a String cannot fail.
        let _ = writeln!(
            to,
            "namespace n{symbol} {{\n{own}\nextern \"C\" void {symbol}(const u32* at, void** args) \
             {{ weft_launch({entry}, at, args, {plain}); }}\n}}"
        );
        for name in defined(&own).filter(|name| !defined(header).any(|known| known == *name)) {
            let _ = writeln!(to, "#undef {name}");
        }
    }
}

/// The names of the macros that a source defines.
fn defined(text: &str) -> impl Iterator<Item = &str> {
    let names = text.lines().filter_map(|line| line.trim_start().strip_prefix("#define "));
    names.filter_map(|rest| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next())
}

fn hash(what: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    hasher.finish()
}

fn run(command: &mut Command) -> Fallible<()> {
    let output =
        command.output().map_err(|e| DriverFailure::new(format!("g++ could not be started ({e}); install it")))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(DriverFailure::new(format!("{command:?}\n{}", String::from_utf8_lossy(&output.stderr)))),
    }
}
