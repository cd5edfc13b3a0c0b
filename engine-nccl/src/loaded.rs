//! NCCL's shared library, opened at run time.

use std::{
    env,
    ffi::{CStr, OsString, c_char, c_int, c_void},
    ptr,
    sync::atomic::{AtomicUsize, Ordering},
};

use comm::ReduceOp;
use libloading::Library;
use numcore::{DType, Error, Result};

use super::api::{Elements, NcclApi, Operation, RawComm, Status, UniqueId};

/// The environment variable with the library's path, for a library that the system does not find by its name.
pub(crate) const VARIABLE: &str = "WEFTGRAD_NCCL_LIBRARY";

/// File names of the library, the usual one first.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The first version with non-blocking communicators and splits of them (2.18).
const OLDEST: c_int = 21_800;

type Comm = *mut c_void;
type Stream = *mut c_void;

/// NCCL's `ncclConfig_t` as of 2.18. The library copies as many bytes as `size` gives, and every later version accepts
/// it.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// A configuration of a non-blocking communicator, with the library's defaults otherwise.
    fn non_blocking() -> Config {
        const UNDEFINED: c_int = c_int::MIN;
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 22_203,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

/// Declares the functions, each with its name in the library.
macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        struct Functions {
            $($field: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
        }

        impl Functions {
            fn of(library: &'static Library) -> std::result::Result<Functions, libloading::Error> {
                Ok(Functions {
                    $(
                        // SAFETY: the symbol is a function of NCCL's with this signature in every version from 2.18 on,
                        // and the library stays open.
                        $field: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }?,
                    )*
                })
            }
        }
    };
}

functions! {
    get_version = "ncclGetVersion": fn(*mut c_int) -> c_int;
    get_unique_id = "ncclGetUniqueId": fn(*mut UniqueId) -> c_int;
    init_rank_config = "ncclCommInitRankConfig": fn(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> c_int;
    split = "ncclCommSplit": fn(Comm, c_int, c_int, *mut Comm, *mut Config) -> c_int;
    get_async_error = "ncclCommGetAsyncError": fn(Comm, *mut c_int) -> c_int;
    finalize = "ncclCommFinalize": fn(Comm) -> c_int;
    destroy = "ncclCommDestroy": fn(Comm) -> c_int;
    abort = "ncclCommAbort": fn(Comm) -> c_int;
    group_start = "ncclGroupStart": fn() -> c_int;
    group_end = "ncclGroupEnd": fn() -> c_int;
    all_reduce = "ncclAllReduce": fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
    reduce = "ncclReduce": fn(*const c_void, *mut c_void, usize, c_int, c_int, c_int, Comm, Stream) -> c_int;
    reduce_scatter = "ncclReduceScatter": fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
    all_gather = "ncclAllGather": fn(*const c_void, *mut c_void, usize, c_int, Comm, Stream) -> c_int;
    broadcast = "ncclBroadcast": fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
    send = "ncclSend": fn(*const c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
    recv = "ncclRecv": fn(*mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
    error_string = "ncclGetErrorString": fn(c_int) -> *const c_char;
    last_error = "ncclGetLastError": fn(Comm) -> *const c_char;
}

/// The color of a rank without a group (`NCCL_SPLIT_NOCOLOR`).
const NO_COLOR: c_int = -1;

/// The number of NCCL's byte type (`ncclUint8`).
const BYTES: c_int = 1;

/// The library found on this machine.
pub(crate) struct LoadedNccl {
    functions: Functions,
    version: c_int,
}

impl LoadedNccl {
    /// Opens the library: the one that [`VARIABLE`] names, or else the first of the usual names that the system finds.
    pub(crate) fn open() -> Result<LoadedNccl> {
        let given = env::var_os(VARIABLE).filter(|path| !path.is_empty());
        let names: Vec<OsString> = given.map_or_else(|| NAMES.map(OsString::from).to_vec(), |path| vec![path]);
        let mut tried = Vec::new();
        for name in names {
            // SAFETY: opening NCCL runs its constructors, which rely on nothing of this program.
            match unsafe { Library::new(&name) } {
                Ok(library) => return LoadedNccl::of(library),
                Err(why) => tried.push(format!("{}: {}", name.display(), loader_message(&why))),
            }
        }
        let why = format!(
            "NCCL was not found ({}); install it (`pip install nvidia-nccl-cu13` or `-cu12`, or the package `libnccl2`), and put its folder on \
             LD_LIBRARY_PATH or its path in {VARIABLE}",
            tried.join("; ")
        );
        Err(Error::unsupported("Nccl::load", why))
    }

    fn of(library: Library) -> Result<LoadedNccl> {
        // The library keeps its own threads for communicators, so it is never closed.
        let library: &'static Library = Box::leak(Box::new(library));
        let functions = Functions::of(library)
            .map_err(|why| Error::unsupported("Nccl::load", format!("NCCL is older than 2.18, or no NCCL: {why}")))?;
        let mut version = 0;
        // SAFETY: the pointer is valid.
        unsafe { (functions.get_version)(&mut version) };
        if version < OLDEST {
            let why = format!("NCCL {} is older than 2.18; install a newer one", version_text(version));
            return Err(Error::unsupported("Nccl::load", why));
        }
        Ok(LoadedNccl { functions, version })
    }
}

/// The message of the system's loader, which is the source of libloading's error.
fn loader_message(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Formats a version: 22304 as `2.23.4`.
pub(crate) fn version_text(version: i32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// A slot in which the library writes a communicator, at once or later from its own thread; never freed.
fn slot() -> &'static AtomicUsize {
    Box::leak(Box::new(AtomicUsize::new(0)))
}

fn raw(comm: RawComm) -> Comm {
    comm.0 as Comm
}

/// The library's number of a dtype. `bool` is stored as bytes of 0 and 1.
fn type_number(dtype: DType) -> c_int {
    match dtype {
        DType::Bool | DType::U8 | DType::F8E4M3 | DType::F8E5M2 => BYTES,
        DType::I32 => 2,
        DType::U32 => 3,
        DType::I64 => 4,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
    }
}

/// The library's number of a reduction. For bytes of 0 and 1, the maximum is their logical or, and the minimum their
/// and.
fn op_number(op: ReduceOp, dtype: DType) -> c_int {
    match (op, dtype) {
        (ReduceOp::Sum | ReduceOp::Max, DType::Bool) => 2,
        (ReduceOp::Prod | ReduceOp::Min, DType::Bool) => 3,
        (ReduceOp::Sum, _) => 0,
        (ReduceOp::Prod, _) => 1,
        (ReduceOp::Max, _) => 2,
        (ReduceOp::Min, _) => 3,
        (ReduceOp::Avg, _) => 4,
    }
}

impl NcclApi for LoadedNccl {
    fn version(&self) -> i32 {
        self.version
    }

    fn takes_host_memory(&self) -> bool {
        false
    }

    fn unique_id(&self) -> std::result::Result<UniqueId, Status> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the pointer is valid.
        match Status(unsafe { (self.functions.get_unique_id)(&mut id) }) {
            Status::SUCCESS => Ok(id),
            status => Err(status),
        }
    }

    fn init(&self, ranks: usize, id: &UniqueId, rank: usize) -> std::result::Result<RawComm, Status> {
        let (slot, mut config) = (slot(), Config::non_blocking());
        // SAFETY: the slot is valid for good, and the configuration during the call, which copies it.
        let status = unsafe {
            (self.functions.init_rank_config)(slot.as_ptr().cast(), ranks as c_int, *id, rank as c_int, &mut config)
        };
        match (Status(status), slot.load(Ordering::Acquire)) {
            (Status::SUCCESS | Status::IN_PROGRESS, comm) if comm != 0 => Ok(RawComm(comm)),
            (status, _) => Err(status),
        }
    }

    fn split(
        &self,
        parent: RawComm,
        color: Option<i32>,
        key: i32,
    ) -> std::result::Result<&'static AtomicUsize, Status> {
        let (slot, mut config) = (slot(), Config::non_blocking());
        let color = color.unwrap_or(NO_COLOR);
        // SAFETY: the slot is valid for good, and the configuration during the call, which copies it; the communicator
        // is alive by the trait's contract.
        match Status(unsafe { (self.functions.split)(raw(parent), color, key, slot.as_ptr().cast(), &mut config) }) {
            Status::SUCCESS | Status::IN_PROGRESS => Ok(slot),
            status => Err(status),
        }
    }

    fn state(&self, comm: RawComm) -> Status {
        let mut state = 0;
        // SAFETY: the pointer is valid; the communicator is alive by the trait's contract.
        match Status(unsafe { (self.functions.get_async_error)(raw(comm), &mut state) }) {
            Status::SUCCESS => Status(state),
            status => status,
        }
    }

    fn finalize(&self, comm: RawComm) -> Status {
        // SAFETY: the communicator is alive by the trait's contract.
        Status(unsafe { (self.functions.finalize)(raw(comm)) })
    }

    fn destroy(&self, comm: RawComm) {
        // SAFETY: the communicator is alive by the trait's contract, and is not used again.
        unsafe { (self.functions.destroy)(raw(comm)) };
    }

    fn abort(&self, comm: RawComm) {
        // SAFETY: the communicator is alive by the trait's contract, and is not used again.
        unsafe { (self.functions.abort)(raw(comm)) };
    }

    fn group_start(&self) -> Status {
        // SAFETY: it has no conditions.
        Status(unsafe { (self.functions.group_start)() })
    }

    fn group_end(&self) -> Status {
        // SAFETY: a group is open by the trait's contract.
        Status(unsafe { (self.functions.group_end)() })
    }

    // SAFETY: the trait's conditions are those of the functions.
    unsafe fn enqueue(&self, comm: RawComm, operation: &Operation, stream: usize) -> Status {
        let (f, comm, stream) = (&self.functions, raw(comm), stream as Stream);
        let read = |at: u64| at as usize as *const c_void;
        let write = |at: u64| at as usize as *mut c_void;
        let numbers = |of: Elements, op| (of.count, type_number(of.dtype), op_number(op, of.dtype));
        // SAFETY: the caller guarantees the addresses, the communicator and the stream.
        let status = unsafe {
            match *operation {
                Operation::AllReduce { at, of, op } => {
                    let (count, dtype, op) = numbers(of, op);
                    (f.all_reduce)(read(at), write(at), count, dtype, op, comm, stream)
                }
                Operation::Reduce { at, of, op, root } => {
                    let (count, dtype, op) = numbers(of, op);
                    (f.reduce)(read(at), write(at), count, dtype, op, root as c_int, comm, stream)
                }
                Operation::ReduceScatter { from, to, of, op } => {
                    let (count, dtype, op) = numbers(of, op);
                    (f.reduce_scatter)(read(from), write(to), count, dtype, op, comm, stream)
                }
                Operation::AllGather { from, to, bytes } => {
                    (f.all_gather)(read(from), write(to), bytes, BYTES, comm, stream)
                }
                Operation::Broadcast { at, bytes, root } => {
                    (f.broadcast)(read(at), write(at), bytes, BYTES, root as c_int, comm, stream)
                }
                Operation::Send { from, bytes, to } => (f.send)(read(from), bytes, BYTES, to as c_int, comm, stream),
                Operation::Recv { to, bytes, from } => (f.recv)(write(to), bytes, BYTES, from as c_int, comm, stream),
            }
        };
        Status(status)
    }

    fn error_text(&self, status: Status, comm: Option<RawComm>) -> String {
        let text = |at: *const c_char| {
            // SAFETY: NCCL gives null, or text that lives as long as the library or until the next error of this
            // thread.
            (!at.is_null()).then(|| unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned())
        };
        // SAFETY: it takes any number, and a communicator that may be null.
        let (of_code, last) = unsafe {
            (
                text((self.functions.error_string)(status.0)),
                text((self.functions.last_error)(comm.map_or(ptr::null_mut(), raw))),
            )
        };
        let last = last.filter(|text| !text.is_empty()).map_or_else(String::new, |text| format!(": {text}"));
        format!("{} (ncclResult_t {}){last}", of_code.unwrap_or_else(|| "an error".into()), status.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_has_the_size_that_nccl_knows() {
        assert_eq!(size_of::<Config>(), 48);
        assert_eq!(size_of::<UniqueId>(), 128);
    }

    #[test]
    fn versions_are_read_as_nccl_counts() {
        assert_eq!(version_text(22_304), "2.23.4");
        assert_eq!(version_text(21_805), "2.18.5");
    }
}
