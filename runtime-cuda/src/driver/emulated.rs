//! Kernels on the host: the same texts, compiled by a C++ compiler against the emulator of `kernels/shim`, one fiber per thread.
//!
//! Memory is the host's, work is done when a call returns, products are plain loops. What this tests is everything but the
//! hardware: plans, arguments, index arithmetic, the kernels' logic, memory and errors.

use std::{
    alloc::{self, Layout},
    collections::HashMap,
    ffi::c_void,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::{self, Command},
    sync::atomic::{AtomicU64, Ordering},
};

use libloading::Library;
use numcore::DType;
use parking_lot::Mutex;

use super::{About, Driver, Failure, Fallible, Function, Gemm, Grid, Mark, Recording, Side, Stream};
use crate::text::Source;

const EMULATOR: &str = include_str!("../../kernels/shim/emulator.h");

/// What the texts use beyond the emulator's own names.
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

/// Without instructions that fuse, as the host has them all; `-fno-gnu-unique` gives every library its own emulator.
const FLAGS: [&str; 8] =
    ["-std=c++20", "-O1", "-fPIC", "-shared", "-fno-gnu-unique", "-fno-strict-aliasing", "-ffp-contract=off", "-w"];

/// A kernel's entry: grid, threads, shared memory and order; arguments.
type Entry = unsafe extern "C" fn(*const u32, *mut *mut c_void);

/// The host, as a GPU.
pub(crate) struct Emulated {
    about: About,
    folder: PathBuf,
    kernels: Mutex<Kernels>,
    next: AtomicU64,
    blocks: Mutex<HashMap<u64, Layout>>,
}

#[derive(Default)]
struct Kernels {
    loaded: Vec<(Library, Entry)>,
    launches: u32,
}

impl Emulated {
    /// Compiled kernels are kept in `folder`.
    pub(crate) fn new(folder: &Path) -> Fallible<Emulated> {
        let io = |e: std::io::Error| Failure::new(format!("{}: {e}", folder.display()));
        fs::create_dir_all(folder).map_err(io)?;
        let header = format!("{EMULATOR}{MORE}");
        // A folder per header: its precompiled form must be its own.
        let folder = folder.join(format!("{:016x}", hash(&header)));
        fs::create_dir_all(&folder).map_err(io)?;
        let path = folder.join("weft.h");
        let compiled = folder.join("weft.h.gch");
        if !compiled.is_file() {
            let part = folder.join(format!("{}.part", process::id()));
            fs::write(&path, header).map_err(io)?;
            let flags = FLAGS.iter().filter(|f| **f != "-shared");
            run(Command::new("g++").args(flags).args(["-x", "c++-header"]).arg(&path).arg("-o").arg(&part))?;
            fs::rename(&part, &compiled).map_err(io)?;
        }
        let about = About { name: "emulated on the host".into(), processors: 1, memory: 8 << 30, shared: 163 << 10 };
        Ok(Emulated { about, folder, kernels: Mutex::default(), next: AtomicU64::new(1), blocks: Mutex::default() })
    }

    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    fn library(&self, source: &Source) -> Fallible<PathBuf> {
        let name = format!("{:016x}", hash(&(&source.text, &source.entry)));
        let library = self.folder.join(format!("{name}.so"));
        if library.is_file() {
            return Ok(library);
        }
        let plain = !["__syncthreads", "_sync(", "mma_", "__shared__", "DYNAMIC_SHARED"]
            .iter()
            .any(|w| source.text.contains(w));
        let text = format!(
            "#include \"weft.h\"\n{}\nextern \"C\" void weft_entry(const u32* at, void** args) {{ weft_launch({}, at, args, {plain}); }}\n",
            source.text, source.entry
        );
        let io = |e: std::io::Error| Failure::new(format!("{}: {e}", self.folder.display()));
        let unique = format!("{name}-{}-{}", process::id(), self.number());
        let (file, part) = (self.folder.join(format!("{unique}.cpp")), self.folder.join(format!("{unique}.part")));
        fs::write(&file, text).map_err(io)?;
        run(Command::new("g++").args(FLAGS).arg("-I").arg(&self.folder).arg(&file).arg("-o").arg(&part))?;
        fs::remove_file(&file).map_err(io)?;
        fs::rename(&part, &library).map_err(io)?;
        Ok(library)
    }

    fn allocate(&self, bytes: usize) -> Option<u64> {
        let layout = Layout::from_size_align(bytes.max(1), 256).ok()?;
        if bytes > self.about.memory {
            return None;
        }
        // SAFETY: the layout is not empty.
        let at = unsafe { alloc::alloc(layout) };
        if at.is_null() {
            return None;
        }
        // SAFETY: just allocated with this size. NaNs, so that a read of what was never written shows.
        unsafe { at.write_bytes(0xff, bytes) };
        self.blocks.lock().insert(at as u64, layout);
        Some(at as u64)
    }

    fn release(&self, at: u64) {
        if let Some(layout) = self.blocks.lock().remove(&at) {
            // SAFETY: allocated with this layout.
            unsafe { alloc::dealloc(at as *mut u8, layout) };
        }
    }
}

fn hash(what: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    hasher.finish()
}

fn run(command: &mut Command) -> Fallible<()> {
    let output = command.output().map_err(|e| Failure::new(format!("g++ could not be started ({e}); install it")))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(Failure::new(format!("{command:?}\n{}", String::from_utf8_lossy(&output.stderr)))),
    }
}

impl Driver for Emulated {
    fn about(&self) -> &About {
        &self.about
    }

    fn alloc(&self, bytes: usize) -> Fallible<Option<u64>> {
        Ok(self.allocate(bytes))
    }

    // SAFETY: the trait's conditions; a map says what is allocated.
    unsafe fn free(&self, address: u64) {
        self.release(address);
    }

    fn alloc_host(&self, bytes: usize) -> Fallible<*mut u8> {
        self.allocate(bytes).map(|at| at as *mut u8).ok_or_else(|| Failure::new("out of memory"))
    }

    // SAFETY: as above.
    unsafe fn free_host(&self, address: *mut u8) {
        self.release(address as u64);
    }

    fn stream(&self) -> Fallible<Stream> {
        Ok(Stream(self.number()))
    }

    fn destroy_stream(&self, _: Stream) {}

    fn synchronize(&self, _: Stream) -> Fallible<()> {
        Ok(())
    }

    fn mark(&self) -> Fallible<Mark> {
        Ok(Mark(self.number()))
    }

    fn destroy_mark(&self, _: Mark) {}

    fn record(&self, _: Mark, _: Stream) -> Fallible<()> {
        Ok(())
    }

    fn wait(&self, _: Stream, _: Mark) -> Fallible<()> {
        Ok(())
    }

    fn await_mark(&self, _: Mark) -> Fallible<()> {
        Ok(())
    }

    // SAFETY: as above; on the host a copy is done at once.
    unsafe fn copy_in(&self, _: Stream, to: u64, from: *const u8, bytes: usize) -> Fallible<()> {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from, to as *mut u8, bytes) };
        Ok(())
    }

    unsafe fn copy_out(&self, _: Stream, to: *mut u8, from: u64, bytes: usize) -> Fallible<()> {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to, bytes) };
        Ok(())
    }

    unsafe fn zero(&self, _: Stream, at: u64, bytes: usize) -> Fallible<()> {
        // SAFETY: the caller's promise.
        unsafe { (at as *mut u8).write_bytes(0, bytes) };
        Ok(())
    }

    fn load(&self, source: &Source, _: u32) -> Fallible<Function> {
        let path = self.library(source)?;
        let words = |e: libloading::Error| Failure::new(format!("{}: {e}", path.display()));
        // SAFETY: the library was compiled above; loading it runs constructors of the emulator alone.
        let library = unsafe { Library::new(&path) }.map_err(words)?;
        // SAFETY: this is the entry's type.
        let entry = *unsafe { library.get::<Entry>(b"weft_entry") }.map_err(words)?;
        let mut kernels = self.kernels.lock();
        kernels.loaded.push((library, entry));
        Ok(Function(kernels.loaded.len() as u64 - 1))
    }

    // SAFETY: the trait's conditions, which the entry relies on as a kernel does.
    unsafe fn launch(&self, _: Stream, kernel: Function, grid: Grid, args: &mut [*mut c_void]) -> Fallible<()> {
        let [x, y, z] = grid.blocks.map(|b| b as u32);
        if grid.threads[0] * grid.threads[1] > 1024 || y > 65_535 || z > 65_535 || x * y * z == 0 || x > i32::MAX as u32
        {
            return Err(Failure::new(format!("a launch beyond the device's limits: {grid:?}")));
        }
        // One at a time: the emulator's state is global. Threads run in another order at every launch.
        let mut kernels = self.kernels.lock();
        kernels.launches = kernels.launches.wrapping_add(1);
        let at = [x, y, z, grid.threads[0], grid.threads[1], grid.shared, kernels.launches % 3];
        let entry = kernels.loaded[kernel.0 as usize].1;
        // SAFETY: the caller's promise.
        unsafe { entry(at.as_ptr(), args.as_mut_ptr()) };
        Ok(())
    }

    // SAFETY: the trait's conditions.
    unsafe fn gemm(&self, _: Stream, gemm: &Gemm, at: [u64; 3], _: (u64, usize)) -> Fallible<()> {
        let (a, b) = (&gemm.a, &gemm.b);
        let rows = |side: &Side, rows, columns| if side.transposed { columns } else { rows };
        if a.leading < rows(a, gemm.m, gemm.k).max(1)
            || b.leading < rows(b, gemm.k, gemm.n).max(1)
            || gemm.d.leading < gemm.m
        {
            return Err(Failure::new(format!("a leading dimension is too small: {gemm:?}")));
        }
        for (side, at) in [(a, at[0]), (b, at[1]), (&gemm.d, at[2])] {
            if !at.is_multiple_of(u64::from(side.aligned)) {
                return Err(Failure::new(format!("an address is not aligned as stated: {gemm:?}")));
            }
        }
        // SAFETY: the caller's promise.
        unsafe {
            match gemm.dtype {
                DType::F64 => product::<f64>(gemm, at, |p| *p, |x| x),
                DType::F32 => product::<f32>(gemm, at, |p| f64::from(*p), |x| x as f32),
                DType::F16 => product::<half::f16>(gemm, at, |p| (*p).to_f64(), |x| half::f16::from_f32(x as f32)),
                _ => product::<half::bf16>(gemm, at, |p| (*p).to_f64(), |x| half::bf16::from_f32(x as f32)),
            }
        }
        Ok(())
    }

    // Work is done at once, also while it is captured: what remains to be tested is memory. There is nothing to replay.
    fn begin_capture(&self, _: Stream) -> Fallible<()> {
        Ok(())
    }

    fn end_capture(&self, _: Stream) -> Fallible<Recording> {
        Ok(Recording(self.number()))
    }

    fn replay(&self, _: Recording, _: Stream) -> Fallible<()> {
        Ok(())
    }

    fn destroy_recording(&self, _: Recording) {}
}

/// # Safety
/// As for [`Driver::gemm`].
unsafe fn product<T: Copy>(gemm: &Gemm, at: [u64; 3], load: impl Fn(&T) -> f64, store: impl Fn(f64) -> T) {
    let [a, b, d] = at.map(|address| address as *mut T);
    let place = |side: &Side, batch: usize, row: usize, column: usize| {
        let (row, column) = if side.transposed { (column, row) } else { (row, column) };
        batch as isize * side.batch + (column * side.leading + row) as isize
    };
    for batch in 0..gemm.batch {
        for j in 0..gemm.n {
            for i in 0..gemm.m {
                // SAFETY: the caller's promise.
                unsafe {
                    let to = d.offset(place(&gemm.d, batch, i, j));
                    let mut sum = if gemm.add { load(&*to) } else { 0.0 };
                    for l in 0..gemm.k {
                        sum += load(&*a.offset(place(&gemm.a, batch, i, l)))
                            * load(&*b.offset(place(&gemm.b, batch, l, j)));
                    }
                    *to = store(sum);
                }
            }
        }
    }
}
