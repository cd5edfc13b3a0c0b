//! Messages of protocol buffers, as far as the project writes them: event files of TensorBoard, models for ONNX.

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

#[cfg(test)]
mod tests {
    use super::*;

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
