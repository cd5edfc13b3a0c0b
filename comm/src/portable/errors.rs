//! The wire form of errors.

use std::io;

use numcore::{Error, ErrorKind, Result};

use super::{
    super::wire::{WireReader, Writer, malformed},
    Portable,
};

/// The kinds of the system's errors that programs tell apart. Others arrive as `Other`.
const IO_KINDS: [io::ErrorKind; 6] = [
    io::ErrorKind::Other,
    io::ErrorKind::NotFound,
    io::ErrorKind::PermissionDenied,
    io::ErrorKind::AlreadyExists,
    io::ErrorKind::TimedOut,
    io::ErrorKind::StorageFull,
];

impl Portable for io::Error {
    fn write(&self, to: &mut Writer) {
        let kind = IO_KINDS.iter().position(|kind| *kind == self.kind()).unwrap_or(0);
        to.u8(kind as u8).text(&self.to_string());
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        let kind = *IO_KINDS.get(usize::from(from.u8()?)).ok_or_else(|| malformed("a kind of the system's errors"))?;
        Ok(io::Error::new(kind, from.text()?))
    }
}

/// Gives kinds of errors a wire form: a tag, then all fields.
macro_rules! kinds {
    ($($tag:literal $kind:ident { $($field:ident),* })*) => {
        fn write_kind(kind: &ErrorKind, to: &mut Writer) {
            match kind {
                $(ErrorKind::$kind { $($field),* } => {
                    to.u8($tag);
                    $($field.write(to);)*
                })*
                // A kind that this list lacks arrives with its message.
                _ => write_kind(&ErrorKind::Argument { op: "rank", why: kind.to_string() }, to),
            }
        }
        fn read_kind(from: &mut WireReader<'_>) -> Result<ErrorKind> {
            Ok(match from.u8()? {
                $($tag => ErrorKind::$kind { $($field: Portable::read(from)?),* },)*
                _ => return Err(malformed("an error")),
            })
        }
    };
}
kinds! {
    0 Peer { op, peer, cause }
    1 Mismatch { op, why }
    2 Timeout { op, waited, missing, called, calls }
    3 Argument { op, why }
    4 Shape { op, shapes, why }
    5 MissingGradient { names }
    6 Range { op, name, value, allowed }
    7 Config { op, field, why }
    8 Usage { op, why }
    9 Anomaly { op, why }
    10 Schedule { op, why }
    11 Internal { op, why }
    12 Unsupported { op, device, why }
    13 State { name, why }
    14 Format { what, why }
    15 DType { op, dtypes, why }
    16 Index { op, index, position, of, size }
    17 Device { op, devices }
    18 OutOfMemory { device, requested, report }
    19 Backend { op, device, message }
    20 Shared { op, what }
    21 Lent { op, what }
    22 NotResident { name }
    23 Stale { name, saved, now }
    24 GraphFreed { op }
    25 NoGradient { op, why }
    26 Io { path, source }
    27 Other { source }
}

/// An error keeps its kind, with all fields, its rank and its path. The system's errors keep a usual kind and their
/// text, errors of the caller's own their text alone. The line of the call and descriptions of operands stay behind.
impl Portable for Error {
    fn write(&self, to: &mut Writer) {
        write_kind(self.kind(), to);
        self.rank().write(to);
        to.text(self.path());
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        let error = Error::from(read_kind(from)?);
        let rank = Option::<usize>::read(from)?;
        let error = error.within(from.text()?);
        Ok(match rank {
            Some(rank) => error.on_rank(rank),
            None => error,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use numcore::{DType, DeviceBytes, DeviceId, DeviceKind, MemoryReport, OtherQueues, Shape};

    use super::*;

    #[test]
    fn errors_stay_what_they_are() {
        let peer = Error::from(ErrorKind::Peer { op: "send", peer: 3, cause: "no".into() }).on_rank(1);
        let timeout = ErrorKind::Timeout {
            op: "recv",
            waited: Duration::from_secs(1),
            missing: vec![2],
            called: true,
            calls: "last calls:".into(),
        };
        let cuda = DeviceId { kind: DeviceKind::Cuda, index: 3 };
        let report = MemoryReport {
            kept: 3 << 20,
            others: Some(OtherQueues { count: 2, live: 5, kept: 6 }),
            device: Some(DeviceBytes { capacity: 1 << 30, free: 7 << 20 }),
            ..MemoryReport::of_live(1 << 24)
        };
        let others = [
            Error::argument("x", "y").on_rank(2),
            Error::range("x", "y", -1.5, "at least 0"),
            Error::range("x", "y", u64::MAX, "in 0..3"),
            Error::range("x", "y", -1, "in 0..3"),
            Error::config("x", "field", "y"),
            Error::state("x", "y"),
            Error::format("x", "y"),
            Error::mismatch("x", "y"),
            Error::usage("x", "y"),
            Error::anomaly("x", "y"),
            Error::schedule("x", "y"),
            Error::internal("x", "y"),
            Error::unsupported("x", "y"),
            Error::unsupported_on(cuda, "x", "y"),
            Error::shape("x", &[[2, 3].into(), Shape::SCALAR], "y").within("a.b"),
            Error::dtype("x", &[DType::F16, DType::I64], "y"),
            ErrorKind::Index { op: "x", index: Some(-7), position: [1].into(), of: [2, 2].into(), size: Some(5) }
                .into(),
            Error::late_index("x", None),
            ErrorKind::Device { op: "x", devices: vec![cuda, DeviceId { kind: DeviceKind::Cpu, index: 0 }] }.into(),
            ErrorKind::OutOfMemory { device: cuda, requested: 9, report: Box::new(report) }.into(),
            ErrorKind::Backend { op: "x", device: cuda, message: "y".into() }.into(),
            ErrorKind::Shared { op: "x", what: "y".into() }.into(),
            ErrorKind::Lent { op: "x", what: "y".into() }.into(),
            ErrorKind::NotResident { name: "x".into() }.into(),
            ErrorKind::Stale { name: "x".into(), saved: 1, now: 2 }.into(),
            ErrorKind::GraphFreed { op: "x" }.into(),
            ErrorKind::NoGradient { op: "x", why: "y".into() }.into(),
            ErrorKind::MissingGradient { names: vec!["x".into(), "y".into()] }.into(),
            Error::io("a/b", io::Error::new(io::ErrorKind::NotFound, "gone")),
            Error::other("mine"),
        ];
        for error in [peer, Error::from(timeout).on_rank(0)].into_iter().chain(others) {
            let bytes = error.to_bytes();
            let back = Error::from_bytes(&bytes).unwrap();
            assert_eq!((back.to_string(), back.rank()), (error.to_string(), error.rank()));
            assert_eq!(std::mem::discriminant(back.kind()), std::mem::discriminant(error.kind()));
            if let (ErrorKind::Io { source: back, .. }, ErrorKind::Io { source, .. }) = (back.kind(), error.kind()) {
                assert_eq!(back.kind(), source.kind());
            }
            assert!((0..bytes.len()).all(|end| Error::from_bytes(&bytes[..end]).is_err()), "{error}");
        }
    }
}
