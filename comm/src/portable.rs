//! Values that can be sent to another process: the return types of programs on many ranks.

mod errors;

use std::{collections::BTreeMap, error, path::PathBuf, time::Duration};

use numcore::{
    Bytes, DType, DeviceBytes, DeviceId, DeviceKind, Error, MemoryReport, MemoryStats, OtherQueues, Result, Scalar,
    Shape,
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
}
