//! The messages of event files: `Event`, `Summary` and their parts. Fields have the numbers of TensorFlow's
//! `event.proto`, `summary.proto` and `tensor.proto`.

use crate::sink::{Histogram, Picture, Record, Value};
use data::protobuf::ProtoMessage;

/// The message every file begins with.
pub(super) fn version(wall_time: f64) -> Vec<u8> {
    ProtoMessage::new().double(1, wall_time).bytes(3, "brain.Event:2").into_bytes()
}

/// The message with all measurements of a step.
pub(super) fn event(record: &Record) -> Vec<u8> {
    let summary =
        record.values.iter().fold(ProtoMessage::new(), |all, (name, value)| all.message(1, summary(name, value)));
    ProtoMessage::new().double(1, record.seconds()).int(2, record.step as i64).message(5, summary).into_bytes()
}

/// The message that starts a session at a record's step: TensorBoard then drops that step and later ones of earlier
/// files.
pub(super) fn session_start(record: &Record) -> Vec<u8> {
    const START: i64 = 1;
    let log = ProtoMessage::new().int(1, START);
    ProtoMessage::new().double(1, record.seconds()).int(2, record.step as i64).message(7, log).into_bytes()
}

fn summary(name: &str, value: &Value) -> ProtoMessage {
    let tagged = ProtoMessage::new().bytes(1, name);
    match value {
        Value::Scalar(x) => tagged.float(2, *x as f32),
        Value::Image(i) => tagged.message(4, image(i)),
        Value::Histogram(h) => tagged.message(5, histogram(h)),
        Value::Text(words) => text(name, words),
    }
}

fn image(image: &Picture) -> ProtoMessage {
    ProtoMessage::new()
        .int(1, image.height().into())
        .int(2, image.width().into())
        .int(3, image.channels().into())
        .bytes(4, image.to_png())
}

fn histogram(h: &Histogram) -> ProtoMessage {
    ProtoMessage::new()
        .double(1, h.min)
        .double(2, h.max)
        .double(3, h.count() as f64)
        .double(4, h.sum)
        .double(5, h.sum_squares)
        .doubles(6, h.limits.iter().copied())
        .doubles(7, h.counts.iter().map(|&n| n as f64))
}

/// The message of a text: a tensor of one string that belongs to the plugin `text`.
fn text(name: &str, words: &str) -> ProtoMessage {
    const STRING: i64 = 7;
    let plugin = ProtoMessage::new().bytes(1, "text");
    let one_element = ProtoMessage::new().message(2, ProtoMessage::new().int(1, 1));
    let tensor = ProtoMessage::new().int(1, STRING).message(2, one_element).bytes(8, words);
    ProtoMessage::new()
        .bytes(1, format!("{name}/text_summary"))
        .message(8, tensor)
        .message(9, ProtoMessage::new().message(1, plugin))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::{super::frame, *};

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    /// Bytes that TensorBoard 2.21.0 reads.
    #[test]
    fn golden_bytes() {
        let version = "1800000000000000a37f4b2209000000000000f03f1a0d627261696e2e4576656e743a3286bf577a";
        assert_eq!(hex(&frame::of(&version_at(1.0))), version);
        let record = Record { time: UNIX_EPOCH + Duration::from_secs(2), ..Record::new(3, 0) }.scalar("loss", 0.5);
        let event = "1a00000000000000129bd82d09000000000000004010032a0d0a0b0a046c6f7373150000003fbac36b94";
        assert_eq!(hex(&frame::of(&super::event(&record))), event);
    }

    fn version_at(seconds: f64) -> Vec<u8> {
        version(seconds)
    }

    #[test]
    fn texts_histograms_and_pictures() {
        let words = summary("sample", &Value::Text("hi".into())).into_bytes();
        assert_eq!(
            words,
            b"\x0a\x13sample/text_summary\x42\x0c\x08\x07\x12\x04\x12\x02\x08\x01\x42\x02hi\x4a\x08\x0a\x06\x0a\x04text"
        );
        let h = Histogram { max: 1.0, limits: vec![2.0], counts: vec![3], ..Histogram::default() };
        let bytes = summary("h", &Value::Histogram(h)).into_bytes();
        assert_eq!(bytes[..5], *b"\x0a\x01h\x2a\x41");
        assert_eq!(bytes.len(), 5 + 5 * 9 + 2 * 10);
        let image = Picture::new(2, 1, 1, vec![0, 255]).unwrap();
        let bytes = summary("i", &Value::Image(image.clone())).into_bytes();
        let sizes = [&b"\x08\x01\x10\x02\x18\x01\x22"[..], &[image.to_png().len() as u8]].concat();
        assert!(bytes.windows(sizes.len()).any(|w| w == sizes), "{bytes:x?}");
    }
}
