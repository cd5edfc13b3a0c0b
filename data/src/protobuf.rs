//! Messages of protocol buffers: event files of TensorBoard, which are written, and models in ONNX's format, which are
//! written and read.

use numcore::{Error, Result};

/// A message under construction. Fields are written in the order of the calls.
#[derive(Clone, Debug, Default)]
pub struct ProtoMessage(Vec<u8>);

/// The wire type of a field: the encoding of its value.
#[derive(Clone, Copy)]
enum Wire {
    Varint = 0,
    Fixed64 = 1,
    Bytes = 2,
    Fixed32 = 5,
}

impl ProtoMessage {
    /// A message without fields.
    pub fn new() -> Self {
        Self::default()
    }

    /// The encoded message.
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    /// Appends a field of `int32`, `int64`, `bool` or an `enum`. Negative values take ten bytes.
    pub fn int(mut self, field: u32, value: i64) -> Self {
        self.key(field, Wire::Varint);
        self.varint(value as u64);
        self
    }

    /// Appends a field of `double`.
    pub fn double(mut self, field: u32, value: f64) -> Self {
        self.key(field, Wire::Fixed64);
        self.0.extend(value.to_le_bytes());
        self
    }

    /// Appends a field of `float`.
    pub fn float(mut self, field: u32, value: f32) -> Self {
        self.key(field, Wire::Fixed32);
        self.0.extend(value.to_le_bytes());
        self
    }

    /// Appends a field of `bytes` or `string`.
    pub fn bytes(mut self, field: u32, value: impl AsRef<[u8]>) -> Self {
        let value = value.as_ref();
        self.key(field, Wire::Bytes);
        self.varint(value.len() as u64);
        self.0.extend_from_slice(value);
        self
    }

    /// Appends a field that is a message.
    pub fn message(self, field: u32, value: ProtoMessage) -> Self {
        self.bytes(field, value.0)
    }

    /// Appends a repeated field of messages.
    pub fn each<'m>(self, field: u32, messages: impl IntoIterator<Item = &'m ProtoMessage>) -> Self {
        messages.into_iter().fold(self, |message, part| message.bytes(field, &part.0))
    }

    /// Appends a repeated field of `double`, packed.
    pub fn doubles(self, field: u32, values: impl IntoIterator<Item = f64>) -> Self {
        let packed: Vec<u8> = values.into_iter().flat_map(f64::to_le_bytes).collect();
        self.bytes(field, packed)
    }

    fn key(&mut self, field: u32, wire: Wire) {
        self.varint(u64::from(field) << 3 | wire as u64);
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

/// The fields of an encoded message, in the order of the file. A malformed field is an error, and the last item.
///
/// ```
/// use data::protobuf::{ProtoFields, ProtoMessage, ProtoValue};
/// let bytes = ProtoMessage::new().int(1, 150).bytes(2, "testing").into_bytes();
/// let fields = ProtoFields::new(&bytes).collect::<numcore::Result<Vec<_>>>().unwrap();
/// assert_eq!(fields, [(1, ProtoValue::Int(150)), (2, ProtoValue::Bytes(b"testing"))]);
/// ```
#[derive(Clone, Debug)]
pub struct ProtoFields<'a>(&'a [u8]);

/// The value of a field, of which the file has the encoding alone: the reader of a message knows the type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProtoValue<'a> {
    /// An `int32`, `int64`, `bool` or `enum`; the bits of other integers.
    Int(i64),
    /// The bits of a `double`, or of an integer of eight bytes.
    Fixed64(u64),
    /// A `string`, `bytes`, message or packed list.
    Bytes(&'a [u8]),
    /// The bits of a `float`, or of an integer of four bytes.
    Fixed32(u32),
}

impl<'a> ProtoFields<'a> {
    /// The fields of the message in `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        ProtoFields(bytes)
    }

    /// The integers of a packed list.
    ///
    /// # Errors
    /// Fails if an integer is cut off, or is longer than ten bytes.
    pub fn packed_ints(bytes: &'a [u8]) -> Result<Vec<i64>> {
        let mut rest = ProtoFields(bytes);
        let mut found = Vec::new();
        while !rest.0.is_empty() {
            found.push(rest.varint()? as i64);
        }
        Ok(found)
    }

    fn varint(&mut self) -> Result<u64> {
        let mut value = 0;
        for (i, &byte) in self.0.iter().take(10).enumerate() {
            value |= u64::from(byte & 0x7f) << (7 * i);
            if byte < 0x80 {
                self.0 = &self.0[i + 1..];
                return Ok(value);
            }
        }
        Err(malformed(format!("an integer has no end within {} bytes", self.0.len().min(10))))
    }

    fn take(&mut self, len: u64) -> Result<&'a [u8]> {
        let Some((taken, rest)) = usize::try_from(len).ok().and_then(|len| self.0.split_at_checked(len)) else {
            return Err(malformed(format!("a value of {len} bytes in a message with {} bytes left", self.0.len())));
        };
        self.0 = rest;
        Ok(taken)
    }

    fn field(&mut self) -> Result<(u32, ProtoValue<'a>)> {
        let key = self.varint()?;
        let number = u32::try_from(key >> 3).map_err(|_| malformed(format!("a field has the key {key}")))?;
        let value = match key & 7 {
            0 => ProtoValue::Int(self.varint()? as i64),
            1 => ProtoValue::Fixed64(u64::from_le_bytes(fixed(self.take(8)?))),
            2 => {
                let len = self.varint()?;
                ProtoValue::Bytes(self.take(len)?)
            }
            5 => ProtoValue::Fixed32(u32::from_le_bytes(fixed(self.take(4)?))),
            wire => return Err(malformed(format!("field {number} has the wire type {wire}"))),
        };
        Ok((number, value))
    }
}

impl<'a> Iterator for ProtoFields<'a> {
    type Item = Result<(u32, ProtoValue<'a>)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.0 = &[];
        }
        Some(field)
    }
}

/// The first `N` bytes of a value that has as many.
fn fixed<const N: usize>(bytes: &[u8]) -> [u8; N] {
    std::array::from_fn(|i| bytes[i])
}

fn malformed(why: String) -> Error {
    Error::format("a message of protocol buffers", why)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> Result<Vec<(u32, ProtoValue<'_>)>> {
        ProtoFields::new(bytes).collect()
    }

    #[test]
    fn fields_are_read_as_they_were_written() {
        let inner = ProtoMessage::new().int(1, -2);
        let bytes = ProtoMessage::new().message(3, inner).float(16, 1.0).double(5, 2.0).int(9, i64::MIN).into_bytes();
        let due = [
            (3, ProtoValue::Bytes(&[8, 254, 255, 255, 255, 255, 255, 255, 255, 255, 1])),
            (16, ProtoValue::Fixed32(1f32.to_bits())),
            (5, ProtoValue::Fixed64(2f64.to_bits())),
            (9, ProtoValue::Int(i64::MIN)),
        ];
        assert_eq!(read(&bytes).unwrap(), due);
        assert_eq!(ProtoFields::packed_ints(&[1, 0x96, 1, 0]).unwrap(), [1, 150, 0]);
    }

    #[test]
    fn malformed_messages_are_errors_wherever_they_end() {
        let bytes = ProtoMessage::new().int(1, 1 << 40).bytes(2, "text").float(3, 1.0).double(4, 1.0).into_bytes();
        let ends: Vec<usize> = (0..=bytes.len()).filter(|&end| read(&bytes[..end]).is_ok()).collect();
        assert_eq!(ends, [0, 7, 13, 18, 27], "only whole fields are messages");
        for bad in [&[0x0b][..], &[0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f], &[0x08, 0xff, 0xff, 0xff]] {
            assert!(read(bad).is_err(), "{bad:?}");
        }
        // Eleven bytes, and a field's number beyond 32 bits.
        assert!(read(&[[0x08].as_slice(), &[0xff; 10], &[1]].concat()).is_err());
        assert!(read(&[0xf8, 0xff, 0xff, 0xff, 0xff, 0x7f, 0]).is_err());
    }

    #[test]
    fn fields_are_those_of_the_encoding_guide() {
        assert_eq!(ProtoMessage::new().int(1, 150).into_bytes(), [0x08, 0x96, 0x01]);
        assert_eq!(ProtoMessage::new().bytes(2, "testing").into_bytes(), b"\x12\x07testing");
        assert_eq!(
            ProtoMessage::new().message(3, ProtoMessage::new().int(1, 150)).into_bytes(),
            [0x1a, 3, 0x08, 0x96, 0x01]
        );
        assert_eq!(ProtoMessage::new().int(1, -2).into_bytes(), [8, 254, 255, 255, 255, 255, 255, 255, 255, 255, 1]);
        assert_eq!(ProtoMessage::new().float(16, 1.0).into_bytes(), [0x85, 0x01, 0, 0, 0x80, 0x3f]);
        assert_eq!(ProtoMessage::new().doubles(6, [1.0]).into_bytes(), [0x32, 8, 0, 0, 0, 0, 0, 0, 0xf0, 0x3f]);
    }
}
