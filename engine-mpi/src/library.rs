//! The MPI library, used by the one thread that owns it. All calls of MPI are in this file.
//!
//! Only point-to-point messages are used. Collectives are made of them, so that sums have this project's order on every
//! version. All of this crate's `unsafe` is in this file.

use std::{ffi::c_int, marker::PhantomData, ptr};

use ::mpi::ffi;
use engine_process::{Channel, Request, Test, Transport};
use numcore::{Error, Result};

/// The environment variable that `mpirun --with-ft ulfm` sets for its processes.
const FAULT_TOLERANCE: &str = "OMPI_MCA_mpi_ft_enable";

/// Error classes of dead processes, as Open MPI 5 numbers them. Earlier versions have no such error.
const PROCESS_FAILED: [c_int; 2] = [75, 76];

/// MPI between `MPI_Init_thread` and `MPI_Finalize`. It stays on the thread that made it.
pub(crate) struct Library {
    control: ffi::MPI_Comm,
    data: ffi::MPI_Comm,
    rank: usize,
    size: usize,
    tags: u32,
    /// MPI's handles of operations, by request number; `free` lists the numbers that can be reused.
    handles: Vec<ffi::MPI_Request>,
    free: Vec<usize>,
    stays: PhantomData<*const ()>,
}

impl Library {
    /// Initialises MPI on this thread, which is possible once in a process.
    pub(crate) fn init() -> Result<Library> {
        let mut given = 0;
        // SAFETY: null arguments are allowed, and `given` outlives the call.
        let code = unsafe {
            ffi::MPI_Init_thread(ptr::null_mut(), ptr::null_mut(), ffi::RSMPI_THREAD_FUNNELED, &raw mut given)
        };
        check("MPI_Init_thread", code)?;
        // SAFETY: MPI is initialised, and the world's communicator is one of its constants.
        let world = unsafe { ffi::RSMPI_COMM_WORLD };
        let (mut rank, mut size) = (0, 0);
        // SAFETY: as above; both numbers outlive the calls.
        check("MPI_Comm_rank", unsafe { ffi::MPI_Comm_rank(world, &raw mut rank) })?;
        // SAFETY: as above.
        check("MPI_Comm_size", unsafe { ffi::MPI_Comm_size(world, &raw mut size) })?;
        let [control, data] = [duplicate(world)?, duplicate(world)?];
        let (rank, size, tags) = (rank as usize, size as usize, largest_tag(world));
        Ok(Library { control, data, rank, size, tags, handles: Vec::new(), free: Vec::new(), stays: PhantomData })
    }

    fn channel(&self, channel: Channel) -> ffi::MPI_Comm {
        match channel {
            Channel::Control => self.control,
            Channel::Data => self.data,
        }
    }

    fn register(&mut self, handle: ffi::MPI_Request) -> Request {
        let Some(number) = self.free.pop() else {
            self.handles.push(handle);
            return Request(self.handles.len() - 1);
        };
        self.handles[number] = handle;
        Request(number)
    }
}

impl Transport for Library {
    fn name(&self) -> &'static str {
        "MPI"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn tags(&self) -> u32 {
        self.tags
    }

    fn reports_deaths(&self) -> Result<(), String> {
        if std::env::var(FAULT_TOLERANCE).is_ok_and(|value| is_on(&value)) {
            return Ok(());
        }
        Err("this launcher ends all processes when one dies, so no process would be left to recover: start with Open MPI 5 and `mpirun --with-ft ulfm`, or \
             save checkpoints and start again from the last one, on as many processes as there are then"
            .into())
    }

    fn ends_together(&self) -> bool {
        true
    }

    // SAFETY: asked of callers as the trait says.
    unsafe fn send(&mut self, on: Channel, from: *const u8, bytes: usize, to: usize, tag: u32) -> Result<Request> {
        let mut request = null();
        // SAFETY: the caller promises the memory; `Library` exists between initialisation and the end. All lengths,
        // ranks and tags in use fit (callers keep `bytes` below `c_int::MAX`).
        let code = unsafe {
            let (comm, kind) = (self.channel(on), ffi::RSMPI_UINT8_T);
            ffi::MPI_Isend(from.cast(), bytes as c_int, kind, to as c_int, tag as c_int, comm, &raw mut request)
        };
        check("MPI_Isend", code).map(|()| self.register(request))
    }

    // SAFETY: asked of callers as the trait says.
    unsafe fn receive(&mut self, on: Channel, into: *mut u8, bytes: usize, from: usize, tag: u32) -> Result<Request> {
        let mut request = null();
        // SAFETY: as in `send`.
        let code = unsafe {
            let (comm, kind) = (self.channel(on), ffi::RSMPI_UINT8_T);
            ffi::MPI_Irecv(into.cast(), bytes as c_int, kind, from as c_int, tag as c_int, comm, &raw mut request)
        };
        check("MPI_Irecv", code).map(|()| self.register(request))
    }

    fn test(&mut self, request: &Request) -> Test {
        // SAFETY: a status is numbers, for which zeros are values.
        let (mut ended, mut status) = (0, unsafe { std::mem::zeroed::<ffi::MPI_Status>() });
        // SAFETY: a request of this library; both results outlive the call.
        let code = unsafe { ffi::MPI_Test(&raw mut self.handles[request.0], &raw mut ended, &raw mut status) };
        if code != 0 || ended != 0 {
            self.free.push(request.0);
        }
        if code != 0 {
            return if PROCESS_FAILED.contains(&class(code)) { Test::Dead } else { Test::Failed(error_text(code)) };
        }
        if ended == 0 {
            return Test::Pending;
        }
        let mut count = 0;
        // SAFETY: a status that MPI has filled.
        let code = unsafe { ffi::MPI_Get_count(&raw const status, ffi::RSMPI_UINT8_T, &raw mut count) };
        if code == 0 { Test::Done(count.max(0) as usize) } else { Test::Failed(error_text(code)) }
    }

    fn cancel(&mut self, request: &Request) {
        // SAFETY: a request of this library that has not ended. An error changes nothing.
        let _ = unsafe { ffi::MPI_Cancel(&raw mut self.handles[request.0]) };
    }

    /// Returns true: Open MPI moves large messages only while it is called.
    fn moves_while_tested(&self) -> bool {
        true
    }

    fn abort(&mut self) {
        // SAFETY: MPI is initialised.
        unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, 1) };
    }

    fn finish(self: Box<Self>) -> Result<()> {
        // SAFETY: MPI is initialised, and this value, without which nothing calls it, is gone afterwards.
        check("MPI_Finalize", unsafe { ffi::MPI_Finalize() })
    }
}

fn is_on(value: &str) -> bool {
    matches!(value, "1" | "true")
}

fn null() -> ffi::MPI_Request {
    // SAFETY: a constant of the library.
    unsafe { ffi::RSMPI_REQUEST_NULL }
}

/// A duplicate of the world's communicator that returns errors.
fn duplicate(world: ffi::MPI_Comm) -> Result<ffi::MPI_Comm> {
    // SAFETY: a constant of the library.
    let mut own = unsafe { ffi::RSMPI_COMM_NULL };
    // SAFETY: MPI is initialised, and `own` outlives the call.
    check("MPI_Comm_dup", unsafe { ffi::MPI_Comm_dup(world, &raw mut own) })?;
    // SAFETY: the communicator was made just now.
    check("MPI_Comm_set_errhandler", unsafe { ffi::MPI_Comm_set_errhandler(own, ffi::RSMPI_ERRORS_RETURN) })?;
    Ok(own)
}

/// The largest tag that MPI takes; at least 32767, by the standard.
fn largest_tag(world: ffi::MPI_Comm) -> u32 {
    let (mut value, mut found) = (ptr::null_mut::<c_int>(), 0);
    // SAFETY: the attribute's value is a pointer to a number that the library keeps.
    let code =
        unsafe { ffi::MPI_Comm_get_attr(world, ffi::MPI_TAG_UB as c_int, (&raw mut value).cast(), &raw mut found) };
    if code != 0 || found == 0 || value.is_null() {
        return 32767;
    }
    // SAFETY: the library has said that it is there.
    u32::try_from(unsafe { *value }).unwrap_or(32767)
}

fn class(code: c_int) -> c_int {
    let mut class = code;
    // SAFETY: a code that MPI gave, and a number that outlives the call.
    let _ = unsafe { ffi::MPI_Error_class(code, &raw mut class) };
    class
}

/// MPI's text of an error code.
fn error_text(code: c_int) -> String {
    let (mut text, mut length) = ([0u8; 4096], 0);
    // SAFETY: no version writes more than MPI_MAX_ERROR_STRING bytes, which is below 4096.
    let status = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &raw mut length) };
    let length = usize::try_from(length).unwrap_or(0).min(text.len());
    if status == 0 { String::from_utf8_lossy(&text[..length]).into_owned() } else { format!("error {code}") }
}

fn check(call: &'static str, code: c_int) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(Error::argument(call, error_text(code))) }
}
