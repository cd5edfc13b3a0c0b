//! Values that can be sent to another process: the return types of programs on many ranks.

use std::{collections::BTreeMap, error, io, path::PathBuf, time::Duration};

use numcore::{
    Bytes, DType, DeviceBytes, DeviceId, DeviceKind, Error, ErrorKind, MemoryReport, MemoryStats, OtherQueues, Result,
    Scalar, Shape,
};

use super::{
    ReduceOp, Traffic,
    fingerprint::OPS,
    wire::{WireReader, Writer, malformed},
};

/// A value with a wire form.
pub trait Portable: Send + Sized {
    /// Writes the value's wire form.
    fn write(&self, to: &mut Writer);
    /// Reads a value that [`write`](Portable::write) wrote.
    fn read(from: &mut WireReader<'_>) -> Result<Self>;

    /// The wire form alone, as bytes.
    fn to_bytes(&self) -> Vec<u8> {
        let mut w = Writer::default();
        self.write(&mut w);
        w.finish()
    }

    /// Reads a value from its wire form; bytes after its end are an error.
    fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut r = WireReader::new(bytes);
        let value = Self::read(&mut r)?;
        r.finish()?;
        Ok(value)
    }
}

macro_rules! numbers {
    ($($t:ty),*) => {$(
        impl Portable for $t {
            fn write(&self, to: &mut Writer) {
                to.bytes(&self.to_le_bytes());
            }
            fn read(from: &mut WireReader<'_>) -> Result<Self> {
                from.bytes()?.try_into().map(<$t>::from_le_bytes).map_err(|_| malformed("a number"))
            }
        }
    )*};
}
numbers!(u8, u32, u64, usize, i32, i64, f32, f64);

impl Portable for () {
    fn write(&self, _: &mut Writer) {}
    fn read(_: &mut WireReader<'_>) -> Result<Self> {
        Ok(())
    }
}

impl Portable for bool {
    fn write(&self, to: &mut Writer) {
        to.u8((*self).into());
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        Ok(from.u8()? != 0)
    }
}

impl Portable for String {
    fn write(&self, to: &mut Writer) {
        to.text(self);
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        from.text().map(str::to_string)
    }
}

/// Text that lives as long as the process that reads it: reading leaks it.
impl Portable for &'static str {
    fn write(&self, to: &mut Writer) {
        to.text(self);
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        from.text().map(|text| &*text.to_string().leak())
    }
}

impl Portable for Duration {
    fn write(&self, to: &mut Writer) {
        to.u64(u64::try_from(self.as_nanos()).unwrap_or(u64::MAX));
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        from.u64().map(Duration::from_nanos)
    }
}

/// Gives values of these types the number of their variant as wire form.
macro_rules! variants {
    ($($of:ty: $all:expr, $what:literal;)*) => {$(
        impl Portable for $of {
            fn write(&self, to: &mut Writer) {
                to.u8(*self as u8);
            }
            fn read(from: &mut WireReader<'_>) -> Result<Self> {
                let own = from.u8()?;
                $all.into_iter().find(|of| *of as u8 == own).ok_or_else(|| malformed($what))
            }
        }
    )*};
}
variants! {
    DType: DType::ALL, "an element type";
    ReduceOp: OPS, "a reduction";
    DeviceKind: [DeviceKind::Null, DeviceKind::Cpu, DeviceKind::Cuda, DeviceKind::Wgpu], "a kind of device";
}

/// Gives records the wire form of their fields.
macro_rules! records {
    ($($record:ident { $($field:ident),* })*) => {$(
        impl Portable for $record {
            fn write(&self, to: &mut Writer) {
                $(self.$field.write(to);)*
            }
            fn read(from: &mut WireReader<'_>) -> Result<Self> {
                Ok($record { $($field: Portable::read(from)?),* })
            }
        }
    )*};
}
records! {
    Traffic { calls, payload, sent, exposed }
    DeviceId { kind, index }
    Bytes { live, peak }
    MemoryStats { by_use, total, reserved, allocations }
    OtherQueues { count, live, kept }
    DeviceBytes { capacity, free }
    MemoryReport { stats, kept, largest_kept, others, device }
}

/// Gives values the wire form of their text.
macro_rules! texts {
    ($($of:ty: $text:expr, $read:expr;)*) => {$(
        impl Portable for $of {
            fn write(&self, to: &mut Writer) {
                let text: fn(&Self) -> String = $text;
                to.text(&text(self));
            }
            fn read(from: &mut WireReader<'_>) -> Result<Self> {
                from.text().map($read)
            }
        }
    )*};
}
texts! {
    PathBuf: |path| path.to_string_lossy().into_owned(), PathBuf::from;
    Box<dyn error::Error + Send + Sync>: |own| own.to_string(), Box::from;
}

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

impl Portable for Shape {
    fn write(&self, to: &mut Writer) {
        to.list(self);
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        Shape::new(&from.list()?)
    }
}

impl<T: Portable> Portable for Box<T> {
    fn write(&self, to: &mut Writer) {
        (**self).write(to);
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        T::read(from).map(Box::new)
    }
}

impl<T: Portable> Portable for Option<T> {
    fn write(&self, to: &mut Writer) {
        to.u8(self.is_some().into());
        if let Some(value) = self {
            value.write(to);
        }
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        (from.u8()? != 0).then(|| T::read(from)).transpose()
    }
}

impl<T: Portable> Portable for Vec<T> {
    fn write(&self, to: &mut Writer) {
        to.usize(self.len());
        self.iter().for_each(|value| value.write(to));
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        let length = from.usize()?;
        (0..length).map(|_| T::read(from)).collect()
    }
}

impl<T: Portable, const N: usize> Portable for [T; N] {
    fn write(&self, to: &mut Writer) {
        self.iter().for_each(|value| value.write(to));
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        let values: Vec<T> = (0..N).map(|_| T::read(from)).collect::<Result<_>>()?;
        values.try_into().map_err(|_| malformed("an array"))
    }
}

impl<K: Portable + Ord, V: Portable> Portable for BTreeMap<K, V> {
    fn write(&self, to: &mut Writer) {
        to.usize(self.len());
        self.iter().for_each(|(key, value)| {
            key.write(to);
            value.write(to);
        });
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        let length = from.usize()?;
        (0..length).map(|_| Ok((K::read(from)?, V::read(from)?))).collect()
    }
}

macro_rules! tuples {
    ($(($($t:ident $k:tt),*)),*) => {$(
        impl<$($t: Portable),*> Portable for ($($t,)*) {
            fn write(&self, to: &mut Writer) {
                $(self.$k.write(to);)*
            }
            fn read(from: &mut WireReader<'_>) -> Result<Self> {
                Ok(($($t::read(from)?,)*))
            }
        }
    )*};
}
tuples!((A 0, B 1), (A 0, B 1, C 2), (A 0, B 1, C 2, D 3), (A 0, B 1, C 2, D 3, E 4));

impl<T: Portable> Portable for Result<T> {
    fn write(&self, to: &mut Writer) {
        to.u8(self.is_ok().into());
        match self {
            Ok(value) => value.write(to),
            Err(error) => error.write(to),
        }
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        Ok(if from.u8()? != 0 { Ok(T::read(from)?) } else { Err(Error::read(from)?) })
    }
}

impl Portable for Scalar {
    fn write(&self, to: &mut Writer) {
        match *self {
            Scalar::F64(x) => x.write(to.u8(0)),
            Scalar::I64(x) => x.write(to.u8(1)),
            Scalar::U64(x) => x.write(to.u8(2)),
        }
    }
    fn read(from: &mut WireReader<'_>) -> Result<Self> {
        match from.u8()? {
            0 => f64::read(from).map(Scalar::F64),
            1 => i64::read(from).map(Scalar::I64),
            2 => u64::read(from).map(Scalar::U64),
            _ => Err(malformed("a scalar")),
        }
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
    use super::*;

    #[test]
    fn values_of_every_kind_come_back() {
        let map: BTreeMap<String, (f32, bool)> = [("a".to_string(), (f32::MIN, true))].into();
        let value = (vec![Some(1.5f64), None], [3usize, 4], map, ("é".to_string(), Duration::from_millis(3)));
        assert_eq!(<_>::from_bytes(&value.to_bytes()).ok(), Some(value.clone()));
        let bytes = value.to_bytes();
        let read = |bytes: &[u8]| {
            <(Vec<Option<f64>>, [usize; 2], BTreeMap<String, (f32, bool)>, (String, Duration))>::from_bytes(bytes)
        };
        assert!((0..bytes.len()).all(|end| read(&bytes[..end]).is_err()));
    }

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
