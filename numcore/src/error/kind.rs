//! The kinds of errors, and the message of each.

use std::{fmt, io, path::PathBuf};

use crate::{DType, DeviceId, MemoryReport, Scalar, Shape};

/// The kinds of errors, by which a caller decides. Deliberately, no variant is only a string.
///
/// | kind | when | what a caller does |
/// |---|---|---|
/// | `Shape`, `DType`, `Device` | operands, or lists of one length, do not fit each other | convert them explicitly |
/// | `Range` | a number, size, count or index given as a number is outside what is allowed | give another |
/// | `Config` | an option is invalid, or contradicts another | change the option `field` |
/// | `Usage` | an object was called too early, too late or twice, or with parts of another | correct the order |
/// | `Unsupported` | the combination is not built, for this device or at all | choose another, or another device |
/// | `Index` | an element of a tensor of indices is out of range | check the data |
/// | `State` | a named parameter, or entry of a checkpoint, does not fit | load or name it differently |
/// | `Format` | a file, a message or a text is malformed | check where it comes from |
/// | `Io` | the system refused a file, a folder or a thread | retry, or free the resource |
/// | `Anomaly` | a value that must be finite is not | go back, or lower the learning rate |
/// | `OutOfMemory`, `Backend` | the device failed | less memory, or another device |
/// | `Shared`, `Lent` | memory to write has another holder | drop the other holder |
/// | `NotResident`, `Stale`, `GraphFreed`, `NoGradient`, `MissingGradient` | the tape cannot go on | see the variant |
/// | `Peer`, `Timeout`, `Mismatch` | other ranks failed, are missing, or made other calls | build a new communicator |
/// | `Schedule` | a pipeline's schedule breaks a rule, or is for other ranks or stages | generate another |
/// | `Internal` | a bug of these libraries | report it |
/// | `Argument` | an argument that no other kind names | read the message |
/// | `Other` | an error of the caller's own | `source()` is that error |
#[derive(Debug)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Shapes that do not fit the operation.
    Shape {
        /// The name of the operation that failed.
        op: &'static str,
        /// The shapes of the operands.
        shapes: Vec<Shape>,
        /// The rule that the shapes break, and the remedy.
        why: String,
    },
    /// Element types that do not fit the operation, or each other.
    DType {
        /// The name of the operation that failed.
        op: &'static str,
        /// The dtypes of the operands.
        dtypes: Vec<DType>,
        /// The rule that the dtypes break, and the remedy.
        why: String,
    },
    /// A number is outside of what the operation allows: a size, a count, a rank, a position, an option of a function.
    Range {
        /// The name of the operation that failed.
        op: &'static str,
        /// The name of the argument, or of the number that was computed from the arguments.
        name: &'static str,
        /// The number that was given.
        value: Scalar,
        /// The numbers that are allowed, and the remedy.
        allowed: String,
    },
    /// The call does not fit the state of its object. It comes too early, too late or twice, or with parts that were
    /// made for another object.
    Usage {
        /// The name of the operation that failed.
        op: &'static str,
        /// The state of the object, and the call to make first or instead.
        why: String,
    },
    /// An argument breaks a rule of the operation, and no other kind names the rule.
    Argument {
        /// The name of the operation that failed.
        op: &'static str,
        /// The rule that the argument breaks, and the remedy.
        why: String,
    },
    /// An index is out of range.
    Index {
        /// The name of the operation that failed.
        op: &'static str,
        /// The index that is out of range; `None` if the device found it later, and does not keep it.
        index: Option<i64>,
        /// The position of the index in the tensor of indices; empty without an index.
        position: Shape,
        /// The shape of the tensor of indices; empty without an index.
        of: Shape,
        /// The size of the indexed axis, if the device keeps it.
        size: Option<usize>,
    },
    /// The operands are on different devices.
    Device {
        /// The name of the operation that failed.
        op: &'static str,
        /// The devices, in operand order.
        devices: Vec<DeviceId>,
    },
    /// The operation, or this combination of its options, is not built; nothing was changed silently.
    Unsupported {
        /// The name of the operation that failed.
        op: &'static str,
        /// The device that does not support it; `None` if no device, library or build of this kind does.
        device: Option<DeviceId>,
        /// The capability that is lacking, and the remedy.
        why: String,
    },
    /// A memory allocation failed.
    OutOfMemory {
        /// The device whose memory is exhausted.
        device: DeviceId,
        /// The size of the failed allocation, in bytes.
        requested: usize,
        /// The holders of the device's memory when the allocation failed.
        report: Box<MemoryReport>,
    },
    /// The device or its driver reported a failure.
    Backend {
        /// The name of the operation that failed.
        op: &'static str,
        /// The device on which it failed.
        device: DeviceId,
        /// The driver's own message.
        message: String,
    },
    /// The memory to write has another holder.
    Shared {
        /// The name of the operation that failed.
        op: &'static str,
        /// The memory: a parameter's name, or a range of a flat buffer.
        what: String,
    },
    /// A range of a flat buffer is already lent, was not lent, or belongs to another buffer.
    Lent {
        /// The name of the operation that failed.
        op: &'static str,
        /// The range, and its state.
        what: String,
    },
    /// A parameter's value is not in memory, and nothing can fetch it.
    NotResident {
        /// The name of the parameter.
        name: String,
    },
    /// A value saved for backward was changed before backward.
    Stale {
        /// The name of the parameter.
        name: String,
        /// The parameter's version when it was saved for backward.
        saved: u64,
        /// The parameter's version at backward.
        now: u64,
    },
    /// Backward ran through a graph whose saved values were freed.
    GraphFreed {
        /// The operation at which the backward pass stopped.
        op: &'static str,
    },
    /// A value that must be finite is not: an operation's result during anomaly detection, a loss, gradients, logits.
    Anomaly {
        /// The operation that found the value.
        op: &'static str,
        /// The value and its place; during anomaly detection also the parameters that preceded it.
        why: String,
    },
    /// A gradient was requested for an operation that has none.
    NoGradient {
        /// The name of the operation that failed.
        op: &'static str,
        /// The reason why it has no gradient, and the remedy.
        why: String,
    },
    /// Parameters that took no part in the loss.
    MissingGradient {
        /// The names of the unused parameters, in the model's order.
        names: Vec<String>,
    },
    /// Another rank failed, so that no rank can continue; the communicator is unusable from now on.
    Peer {
        /// The operation that this rank was waiting for.
        op: &'static str,
        /// The rank that failed first.
        peer: usize,
        /// The error of that rank.
        cause: String,
    },
    /// Ranks made different collective calls at one position of the sequence, or gave values that must be equal.
    Mismatch {
        /// The name of the operation that failed.
        op: &'static str,
        /// Both calls, with their source lines, or the difference.
        why: String,
    },
    /// A deadline passed before every rank had arrived, or without progress between the ranks that had.
    Timeout {
        /// The name of the operation that failed.
        op: &'static str,
        /// The time waited.
        waited: std::time::Duration,
        /// The ranks that had not arrived; if `called`, the ranks with which there was no progress.
        missing: Vec<usize>,
        /// True if these ranks had made the call.
        called: bool,
        /// The last calls of every rank.
        calls: String,
    },
    /// A named parameter, or a named entry of a state dict or checkpoint, does not fit.
    State {
        /// The name of the parameter or entry.
        name: String,
        /// The mismatch, and the remedy.
        why: String,
    },
    /// A file, a stream, a message or a text is malformed.
    Format {
        /// The file or stream that was being read, or the operation that reads the text.
        what: String,
        /// The rule of the format that it breaks.
        why: String,
    },
    /// The operating system reported an error.
    Io {
        /// The path of the file or folder, or the name of another resource that was refused, such as `thread comm-0`.
        path: PathBuf,
        /// The system's own error.
        source: io::Error,
    },
    /// A pipeline schedule that breaks a rule, would never end, or is for other ranks, stages or micro-batches.
    Schedule {
        /// The action on the schedule: generation, lowering, checking, simulation or a run.
        op: &'static str,
        /// The rule that the schedule breaks, with rank, position and action if there are any.
        why: String,
    },
    /// An option of a configuration is out of range, or contradicts another option.
    Config {
        /// The name of the configuration.
        op: &'static str,
        /// The name of the option.
        field: &'static str,
        /// The rule that the option breaks, and the remedy.
        why: String,
    },
    /// An invariant of the libraries was broken: a bug in them, worth a report.
    Internal {
        /// The operation that found it.
        op: &'static str,
        /// The invariant that did not hold.
        why: String,
    },
    /// An error of the caller's own, passed through a closure that was given to a library.
    Other {
        /// The error as it was given.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ErrorKind::Shape { op, shapes, why } => write!(f, "{op}: shapes {}: {why}", List(shapes)),
            ErrorKind::DType { op, dtypes, why } => write!(f, "{op}: dtypes {}: {why}", List(dtypes)),
            ErrorKind::Range { op, name, value, allowed } => {
                write!(f, "{op}: {name} is {value}, and must be {allowed}")
            }
            ErrorKind::Argument { op, why }
            | ErrorKind::Usage { op, why }
            | ErrorKind::Schedule { op, why }
            | ErrorKind::Config { op, why, .. }
            | ErrorKind::Internal { op, why } => write!(f, "{op}: {why}"),
            ErrorKind::Index { op, index, position, of, size } => {
                match index {
                    Some(index) => write!(f, "{op}: index {index} at position {position} of the index {of}")?,
                    None => write!(f, "{op}: an index")?,
                }
                match size {
                    Some(size) => write!(f, " is not in 0..{size}")?,
                    None => write!(f, " is out of range")?,
                }
                match index {
                    Some(_) => Ok(()),
                    None => write!(f, "; it was found when results were read, so look at the operations before"),
                }
            }
            ErrorKind::Device { op, devices } => {
                write!(f, "{op}: tensors of different devices ({}); move them with `to_device` first", List(devices))
            }
            ErrorKind::Unsupported { op, device: Some(device), why } => {
                write!(f, "{op}: not supported on {device}: {why}")
            }
            ErrorKind::Unsupported { op, device: None, why } => write!(f, "{op}: not supported: {why}"),
            ErrorKind::OutOfMemory { device, requested, report } => write!(
                f,
                "out of memory on {device}: {requested} bytes asked for; {report}; what helps: smaller batches or micro-batches, `checkpoint`, bf16, ZeRO, and `trim` after building a model"
            ),
            ErrorKind::Backend { op, device, message } => write!(f, "{op}: {device} failed: {message}"),
            ErrorKind::Shared { op, what } => {
                write!(f, "{op}: {what} is still shared; drop the tensors that alias it before it is written")
            }
            ErrorKind::Lent { op, what } => write!(f, "{op}: {what}"),
            ErrorKind::NotResident { name } => {
                write!(
                    f,
                    "parameter `{name}` is not in memory and has no residency that could fetch it; put back what was \
                     taken out, or read the model while the trainer that shards its parameters lives"
                )
            }
            ErrorKind::Stale { name, saved, now } => write!(
                f,
                "parameter `{name}` was changed after it was saved for backward (version {saved}, now {now}); run backward before the optimizer step"
            ),
            ErrorKind::GraphFreed { op } => write!(
                f,
                "backward: the values saved by `{op}` were freed by an earlier backward; use `retain_graph` on the first one"
            ),
            ErrorKind::Anomaly { op, why } => write!(f, "{op}: {why}"),
            ErrorKind::NoGradient { op, why } => write!(f, "{op}: no gradient: {why}"),
            ErrorKind::MissingGradient { names } => {
                write!(f, "no gradient reached: {}; freeze them or use them in the loss", names.join(", "))
            }
            ErrorKind::Peer { op, peer, cause } => {
                write!(f, "{op}: rank {peer} failed, build a new communicator: {cause}")
            }
            ErrorKind::Mismatch { op, why } => write!(f, "{op}: ranks disagree: {why}"),
            ErrorKind::Timeout { op, waited, missing, called, calls } => {
                let (waited, ranks) = (waited.as_secs_f64(), RankList(missing));
                match called {
                    false => write!(f, "{op}: after {waited:.1} s there was no call from {ranks}\n{calls}"),
                    true => write!(f, "{op}: nothing moved for {waited:.1} s to or from {ranks}\n{calls}"),
                }
            }
            ErrorKind::State { name, why } => write!(f, "`{name}`: {why}"),
            ErrorKind::Format { what, why } => write!(f, "{what}: {why}"),
            ErrorKind::Io { path, source } => write!(f, "{}: {source}", path.display()),
            ErrorKind::Other { source } => source.fmt(f),
        }
    }
}

struct List<'a, T>(&'a [T]);

impl<T: fmt::Display> fmt::Display for List<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, x) in self.0.iter().enumerate() {
            write!(f, "{}{x}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

struct RankList<'a>(&'a [usize]);

impl fmt::Display for RankList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank{} {}", if self.0.len() == 1 { "" } else { "s" }, List(self.0))
    }
}
