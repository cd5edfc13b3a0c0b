//! Messages of protocol buffers, as far as ONNX needs them: numbered fields of integers, floats, bytes and messages.

/// A message that is being written.
#[derive(Clone, Debug, Default)]
pub struct OnnxMessage(Vec<u8>);

/// How a field is stored, by the low bits of its tag.
const VARINT: u64 = 0;
const BYTES: u64 = 2;
const FIXED32: u64 = 5;

impl OnnxMessage {
    /// A message without fields.
    pub fn new() -> Self {
        OnnxMessage::default()
    }

    /// With an integer. Negative ones take ten bytes.
    pub fn int(mut self, field: u64, value: i64) -> Self {
        self.varint(field << 3 | VARINT);
        self.varint(value.cast_unsigned());
        self
    }

    /// With a floating-point number of 32 bits.
    pub fn float(mut self, field: u64, value: f32) -> Self {
        self.varint(field << 3 | FIXED32);
        self.0.extend(value.to_le_bytes());
        self
    }

    /// With bytes, or a string.
    pub fn bytes(mut self, field: u64, value: impl AsRef<[u8]>) -> Self {
        self.varint(field << 3 | BYTES);
        self.varint(value.as_ref().len() as u64);
        self.0.extend(value.as_ref());
        self
    }

    /// With each of several messages.
    pub fn each<'m>(self, field: u64, messages: impl IntoIterator<Item = &'m OnnxMessage>) -> Self {
        messages.into_iter().fold(self, |message, part| message.bytes(field, &part.0))
    }

    /// The message as a file holds it.
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
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

    /// The examples of the format's own documentation.
    #[test]
    fn fields_are_stored_as_documented() {
        assert_eq!(OnnxMessage::new().int(1, 150).into_bytes(), [0x08, 0x96, 0x01]);
        let testing = OnnxMessage::new().bytes(2, "testing");
        assert_eq!(testing.into_bytes(), [0x12, 0x07, 0x74, 0x65, 0x73, 0x74, 0x69, 0x6e, 0x67]);
        let inner = OnnxMessage::new().int(1, 150);
        assert_eq!(OnnxMessage::new().each(3, [&inner]).into_bytes(), [0x1a, 0x03, 0x08, 0x96, 0x01]);
        assert_eq!(OnnxMessage::new().int(1, -2).into_bytes().len(), 11);
        assert_eq!(OnnxMessage::new().float(1, 1.0).into_bytes(), [0x0d, 0, 0, 0x80, 0x3f]);
    }
}
