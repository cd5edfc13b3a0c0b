//! Formats behind features: images, Parquet, Arrow, tokenizers. Without the features there is nothing to test.

#[cfg(feature = "image")]
mod images {
    use data::{
        Dataset, Loader,
        sources::image::{Image, ImageFolder},
    };
    use numcore::rng::Philox;

    use crate::common::Folder;

    /// An image whose pixels encode their positions.
    fn gradient(width: u32, height: u32) -> Image {
        let pixel = |i: u32| [(i % width) as u8, (i / width) as u8, 7];
        Image::new(width, height, (0..width * height).flat_map(pixel).collect()).unwrap()
    }

    fn png(image: &Image) -> Vec<u8> {
        let (width, height) = image.size();
        let mut bytes = std::io::Cursor::new(Vec::new());
        let color = image::ExtendedColorType::Rgb8;
        image::write_buffer_with_format(&mut bytes, image.bytes(), width, height, color, image::ImageFormat::Png)
            .unwrap();
        bytes.into_inner()
    }

    #[test]
    fn folders_are_classes() {
        let folder = Folder::new("images");
        folder.file("warp/b.PNG", png(&gradient(4, 3)));
        folder.file("warp/deep/a.png", png(&gradient(2, 2)));
        folder.file("aft/x.png", b"no image");
        folder.file("top.png", png(&gradient(2, 2)));
        // Hidden folders are no classes, and none of their images are in another.
        folder.file(".cache/a.png", png(&gradient(2, 2)));
        folder.file("warp/notes.txt", "no image");
        let images = ImageFolder::open(&folder).unwrap();
        assert_eq!((images.classes(), images.len()), (&["aft", "warp"].map(String::from)[..], 3));
        let error = images.get(0).unwrap_err().to_string();
        assert!(error.contains("x.png: it is no image"), "{error}");
        assert_eq!(images.get(1).unwrap(), (gradient(4, 3), 1));
        assert_eq!(images.get(2).unwrap().0.size(), (2, 2));
        assert!(ImageFolder::open(folder.path("aft")).unwrap_err().to_string().contains("no folder with an image"));
        folder.file("aft/y.WebP", b"an image");
        let error = ImageFolder::open(&folder).unwrap_err().to_string();
        assert!(error.contains("y.WebP") && error.contains("convert"), "{error}");
    }

    #[test]
    fn pieces_are_where_they_should_be() {
        let image = gradient(10, 6);
        assert_eq!(image.crop(2, 1, 2, 1).unwrap().bytes(), [2, 1, 7, 3, 1, 7]);
        assert_eq!(image.center_crop(2, 2).unwrap().bytes()[..3], [4, 2, 7]);
        assert_eq!(image.crop(0, 0, 2, 1).unwrap().flipped().bytes(), [1, 0, 7, 0, 0, 7]);
        assert!(image.crop(9, 0, 2, 1).unwrap_err().to_string().contains("2×1 from (9, 0) is not within 10×6"));
        assert!(image.crop(u32::MAX, 0, 2, 1).is_err() && image.center_crop(11, 1).is_err());
        assert_eq!(image.resize(10, 6).unwrap(), image);
        assert_eq!(image.resize_shorter(3).unwrap().size(), (5, 3));
        assert!(image.resize(0, 3).is_err() && Image::new(2, 2, vec![0; 11]).is_err());
        // Two pixels in one are their mean.
        let halved = Image::new(2, 1, vec![10, 20, 30, 20, 40, 60]).unwrap().resize(1, 1).unwrap();
        assert_eq!(halved.bytes(), [15, 30, 45]);
    }

    #[test]
    fn values_are_normalised_by_channel() {
        let image = Image::new(2, 1, vec![0, 51, 102, 255, 204, 153]).unwrap();
        let values = image.normalized([0.5, 0.0, 0.2], [0.5, 1.0, 0.2]).unwrap();
        let expect = [-1.0, 1.0, 0.2, 0.8, 1.0, 2.0];
        assert_eq!(values.dims(), [3, 1, 2]);
        for (x, y) in values.to_vec::<f32>().unwrap().into_iter().zip(expect) {
            assert!((x - y).abs() < 1e-6, "{x} {y}");
        }
        assert!(image.normalized([0.0; 3], [1.0, 0.0, 1.0]).is_err());
    }

    #[test]
    fn random_pieces_cover_the_image() {
        let image = gradient(9, 7);
        let mut rng = Philox::new(3, 0);
        let (mut places, mut flips) = (std::collections::BTreeSet::new(), 0);
        for _ in 0..500 {
            let piece = image.random_crop(7, 6, &mut rng).unwrap();
            places.insert((piece.bytes()[0], piece.bytes()[1]));
            flips += u32::from(piece.clone().random_flip(&mut rng) != piece);
            assert_eq!(image.random_resized_crop(4, 5, &mut rng).unwrap().size(), (4, 5));
        }
        assert_eq!(places.len(), 6);
        assert!((200..300).contains(&flips), "{flips}");
    }

    #[test]
    fn augmentation_is_keyed_by_example() {
        let folder = Folder::new("augmented");
        for i in 0..12u8 {
            folder.file(&format!("c/{i:02}.png"), png(&Image::new(8, 8, vec![i; 192]).unwrap()));
        }
        let images = ImageFolder::open(&folder).unwrap();
        let pixels = |workers: usize, ranks: usize| -> Vec<Vec<u8>> {
            let one = |rank| {
                let loader = Loader::new(images.clone()).batch(6).shuffle(1).workers(workers).rank(rank, ranks);
                let loader = loader.augment(5, |(image, _), rng| {
                    Ok(image
                        .random_crop(3, 3, rng)?
                        .bytes()
                        .iter()
                        .map(|x| x ^ rng.next_u32() as u8)
                        .collect::<Vec<u8>>())
                });
                loader.epoch(1).unwrap().flat_map(|batch| batch.unwrap().data).collect::<Vec<_>>()
            };
            let mut all: Vec<Vec<u8>> = (0..ranks).flat_map(one).collect();
            all.sort();
            all
        };
        let alone = pixels(0, 1);
        assert!(alone == pixels(3, 1) && alone == pixels(1, 3) && alone == pixels(2, 2));
    }
}

#[cfg(feature = "parquet")]
mod parquet_files {
    use std::{fs::File, path::Path, sync::Arc};

    use data::{
        Dataset, Loader,
        sources::{Cell, Parquet},
    };
    use parquet::{
        data_type::{ByteArray, ByteArrayType, DoubleType, FixedLenByteArray, FixedLenByteArrayType, Int32Type},
        file::{properties::WriterProperties, writer::SerializedFileWriter},
        schema::parser::parse_message_type,
    };

    use crate::common::Folder;

    /// The score of a row; some are not finite.
    fn score(i: usize) -> f64 {
        [f64::NAN, f64::INFINITY, f64::NEG_INFINITY].get(i.wrapping_sub(6)).copied().unwrap_or(i as f64 / 2.0)
    }

    /// Row groups of these sizes; `text` is the number `i` as text, `score` is missing where `i` is divisible by 5.
    fn write(path: &Path, groups: &[usize]) {
        let schema = "message rows { REQUIRED BYTE_ARRAY text (UTF8); OPTIONAL DOUBLE score;
            REQUIRED FIXED_LEN_BYTE_ARRAY (2) half (FLOAT16); }";
        let properties = WriterProperties::builder().set_compression(parquet::basic::Compression::SNAPPY).build();
        let schema = Arc::new(parse_message_type(schema).unwrap());
        let mut writer = SerializedFileWriter::new(File::create(path).unwrap(), schema, Arc::new(properties)).unwrap();
        let mut next = 0;
        for &size in groups {
            let rows: Vec<usize> = (next..next + size).collect();
            next += size;
            let mut group = writer.next_row_group().unwrap();
            let mut column = group.next_column().unwrap().unwrap();
            let texts: Vec<ByteArray> = rows.iter().map(|i| i.to_string().into_bytes().into()).collect();
            column.typed::<ByteArrayType>().write_batch(&texts, None, None).unwrap();
            column.close().unwrap();
            let mut column = group.next_column().unwrap().unwrap();
            let levels: Vec<i16> = rows.iter().map(|i| i16::from(i % 5 != 0)).collect();
            let scores: Vec<f64> = rows.iter().filter(|&i| i % 5 != 0).map(|&i| score(i)).collect();
            column.typed::<DoubleType>().write_batch(&scores, Some(&levels), None).unwrap();
            column.close().unwrap();
            let mut column = group.next_column().unwrap().unwrap();
            let halves: Vec<FixedLenByteArray> =
                rows.iter().map(|_| ByteArray::from(vec![0x00, 0x3e]).into()).collect();
            column.typed::<FixedLenByteArrayType>().write_batch(&halves, None, None).unwrap();
            column.close().unwrap();
            group.close().unwrap();
        }
        writer.close().unwrap();
    }

    #[test]
    fn rows_are_read_over_row_groups() {
        let folder = Folder::new("parquet");
        let path = folder.path("rows.parquet");
        write(&path, &[3, 4, 1, 2, 5, 6]);
        let rows = Parquet::open(&path).unwrap();
        assert_eq!(rows.len(), 21);
        for i in (0..21).rev().chain(0..21) {
            let row = rows.get(i).unwrap();
            assert_eq!((row.text("text").unwrap(), row.number("half").unwrap()), (&*i.to_string(), 1.5));
            let error = row.number("text").unwrap_err().to_string();
            assert!(error.contains(&format!("field `text` is \"{i}\", no number")), "{error}");
            match row.number("score") {
                Ok(found) => assert!(i % 5 != 0 && (found == score(i) || found.is_nan() && i == 6), "{i}: {found}"),
                Err(error) => {
                    assert_eq!(i % 5, 0);
                    assert!(
                        error.to_string().contains(&format!("row {i}: field `score` is null, no number")),
                        "{error}"
                    );
                }
            }
        }
        assert!(rows.get(21).is_err());
        let texts = Parquet::open(&path).unwrap().texts("text").unwrap();
        let read: Vec<String> =
            Loader::new(texts).batch(4).workers(3).epoch(0).unwrap().flat_map(|batch| batch.unwrap().data).collect();
        assert!(read.into_iter().eq((0..21).map(|i| i.to_string())));
    }

    #[test]
    fn columns_are_chosen_by_name() {
        let folder = Folder::new("parquet-columns");
        let path = folder.path("rows.parquet");
        write(&path, &[3]);
        let row = Parquet::open(&path).unwrap().columns(&["score"]).unwrap().get(1).unwrap();
        assert_eq!(row.cell, Cell::Fields([("score".into(), Cell::Float(0.5))].into()));
        assert!(row.text("text").unwrap_err().to_string().contains("row 1: has no field `text`"));
        let error = Parquet::open(&path).unwrap().columns(&["txt"]).err().unwrap().to_string();
        assert!(error.contains("no column `txt` among text, score, half"), "{error}");
    }

    #[test]
    fn a_damaged_row_group_leaves_the_others() {
        let folder = Folder::new("parquet-damaged");
        let path = folder.path("rows.parquet");
        write(&path, &[3, 4]);
        let mut bytes = std::fs::read(&path).unwrap();
        // The first group's pages begin after the magic bytes.
        bytes[4..24].fill(0xff);
        let rows = Parquet::open(folder.file("damaged.parquet", &bytes)).unwrap();
        let error = rows.get(0).unwrap_err().to_string();
        assert!(error.contains("damaged.parquet: row group 0"), "{error}");
        assert_eq!(rows.get(5).unwrap().text("text").unwrap(), "5");
        let error = Parquet::open(folder.file("none.parquet", "no file of this kind")).err().unwrap().to_string();
        assert!(error.contains("none.parquet"), "{error}");
        assert!(Parquet::open(folder.file("cut.parquet", &bytes[..bytes.len() - 9])).is_err());
    }

    #[test]
    fn a_date_that_no_calendar_has_is_an_error() {
        let folder = Folder::new("parquet-dates");
        let path = folder.path("dates.parquet");
        let schema = Arc::new(parse_message_type("message rows { REQUIRED INT32 day (DATE); }").unwrap());
        let mut writer = SerializedFileWriter::new(File::create(&path).unwrap(), schema, Arc::default()).unwrap();
        for day in [1, i32::MAX] {
            let mut group = writer.next_row_group().unwrap();
            let mut column = group.next_column().unwrap().unwrap();
            column.typed::<Int32Type>().write_batch(&[day], None, None).unwrap();
            column.close().unwrap();
            group.close().unwrap();
        }
        writer.close().unwrap();
        let rows = Parquet::open(&path).unwrap();
        assert_eq!(rows.get(0).unwrap().text("day").unwrap(), "1970-01-02");
        let error = rows.get(1).unwrap_err().to_string();
        assert!(error.contains("dates.parquet: row group 1: "), "{error}");
        assert!(rows.get(0).is_ok());
    }

    #[test]
    fn a_folder_is_one_dataset() {
        let folder = Folder::new("parquet-folder");
        for (name, groups) in [("b.parquet", &[2, 3][..]), ("a.parquet", &[4]), ("c.parquet", &[])] {
            write(&folder.path(name), groups);
        }
        folder.file("notes.txt", "no table");
        let rows = Parquet::open(&folder).unwrap();
        let read: Vec<String> =
            (0..rows.len()).map(|i| rows.get(i).unwrap().text("text").unwrap().to_owned()).collect();
        assert_eq!(read, ["0", "1", "2", "3", "0", "1", "2", "3", "4"]);
        let error = rows.get(7).unwrap().number("text").unwrap_err().to_string();
        assert!(error.contains("b.parquet: row 3: field `text`"), "{error}");
        let texts = Parquet::open(&folder).unwrap().texts("text").unwrap();
        assert_eq!((texts.len(), texts.get(8).unwrap()), (9, "4".into()));
        std::fs::copy(crate::references().join("images.parquet"), folder.path("d.parquet")).unwrap();
        let error = Parquet::open(&folder).err().unwrap().to_string();
        assert!(error.contains("d.parquet: its columns are not those of") && error.contains("a.parquet"), "{error}");
        std::fs::create_dir(folder.path("none")).unwrap();
        let error = Parquet::open(folder.path("none")).err().unwrap().to_string();
        assert!(error.contains("none: there is no file *.parquet"), "{error}");
        assert_eq!(Parquet::open_all::<&Path>([]).unwrap().len(), 0);
    }

    #[test]
    fn structs_lists_and_bytes_are_read() {
        let rows = Parquet::open(crate::references().join("images.parquet")).unwrap();
        crate::formats::check_saved(&rows);
    }
}

/// Requires the rows of `conformance/against/data_files.py`.
#[cfg(any(feature = "arrow", feature = "parquet"))]
fn check_saved(rows: &impl data::Dataset<Example = data::sources::TableRow>) {
    assert_eq!(rows.len(), 7);
    for i in (0..7).rev().chain(0..7) {
        let row = rows.get(i).unwrap();
        assert_eq!((row.text("text").unwrap(), row.number("label").unwrap()), (&*format!("row {i}"), i as f64));
        match i {
            3 => assert_eq!(row.field("score").unwrap(), &data::sources::Cell::Null),
            4 => assert!(row.number("score").unwrap().is_nan()),
            _ => assert_eq!(row.number("score").unwrap(), i as f64 / 2.0),
        }
        assert!(row.numbers("tokens").unwrap().into_iter().eq((0..i).map(|token| token as f64)));
        assert_eq!(row.numbers("pair").unwrap(), [i as f64, -(i as f64)]);
        assert_eq!(row.field("good").unwrap(), &data::sources::Cell::Bool(i % 2 == 0));
        assert_eq!(row.text("image.path").unwrap(), format!("{i}.png"));
        let png = row.bytes("image.bytes").unwrap();
        assert_eq!(&png[..4], b"\x89PNG");
        #[cfg(feature = "image")]
        assert_eq!(
            data::sources::image::Image::decode("a row", png).unwrap().bytes(),
            [i as u8, 2 * i as u8, 7].repeat(2)
        );
    }
    let row = rows.get(2).unwrap();
    let says = |error: numcore::Error, words: &str| assert!(error.to_string().contains(words), "{error}");
    says(row.bytes("text").unwrap_err(), "row 2: field `text` is \"row 2\", no bytes");
    says(row.numbers("image").unwrap_err(), "field `image` is a struct of 2 fields, no list of numbers");
    says(row.text("image.bytes").unwrap_err(), "bytes, no text");
    says(row.number("image.size").unwrap_err(), "has no field `image.size`");
}

#[cfg(feature = "arrow")]
mod arrow_files {
    use std::{fs, path::Path};

    use std::sync::Arc;

    use arrow_array::{ArrayRef, Date32Array, Int8Array, RecordBatch};
    use arrow_ipc::{root_as_message, writer::StreamWriter};
    use data::{Dataset, Loader, sources::Arrow};

    use crate::{common::Folder, references};

    /// A stream of one batch: the messages of its schema and of the batch, and the end.
    struct ArrowStream {
        schema: Vec<u8>,
        batch: Vec<u8>,
        end: Vec<u8>,
    }

    impl ArrowStream {
        fn of(columns: &[(&str, ArrayRef)]) -> Self {
            let batch = RecordBatch::try_from_iter(columns.iter().cloned()).unwrap();
            let mut writer = StreamWriter::try_new(Vec::new(), batch.schema_ref()).unwrap();
            writer.write(&batch).unwrap();
            let mut schema = writer.into_inner().unwrap();
            let len = |bytes: &[u8]| {
                let head = 8 + u32::from_le_bytes(bytes[4..8].try_into().unwrap()) as usize;
                head + root_as_message(&bytes[8..head]).unwrap().bodyLength() as usize
            };
            let mut batch = schema.split_off(len(&schema));
            let end = batch.split_off(len(&batch));
            ArrowStream { schema, batch, end }
        }

        /// The streams with another number at a place where the batch has this one.
        fn with(&self, number: i64, other: i64) -> Vec<Vec<u8>> {
            let places = (0..self.batch.len() - 8).filter(|&at| self.batch[at..at + 8] == number.to_le_bytes());
            let changed = places.map(|at| {
                let mut batch = self.batch.clone();
                batch[at..at + 8].copy_from_slice(&other.to_le_bytes());
                [&self.schema[..], &batch, &self.end].concat()
            });
            changed.collect()
        }
    }

    #[test]
    fn messages_that_make_no_sense_are_refused() {
        let folder = Folder::new("arrow-messages");
        let says = |bytes: &[u8], words: &str| {
            let error = Arrow::open(folder.file("a.arrow", bytes)).err().expect("an error").to_string();
            assert!(error.contains("a.arrow") && error.contains(words), "{error} should say {words}");
        };
        let stream = ArrowStream::of(&[("x", Arc::new(Int8Array::from_iter_values((0..291).map(|i| i as i8))))]);
        let ArrowStream { schema, batch, end } = &stream;
        let all = [&schema[..], batch, end].concat();
        let rows = Arrow::open(folder.file("whole.arrow", [&all[..], b"more"].concat())).unwrap();
        assert_eq!(
            (rows.len(), rows.get(290).unwrap().number("x").unwrap()),
            (291, 34.0),
            "all after the end is ignored"
        );
        says(&[batch, &schema[..], end].concat(), "at byte 0: a schema should come first, then record batches alone");
        says(&[&schema[..], schema, batch].concat(), "a schema should come first");
        says(&all[..schema.len() + batch.len() - 1], "the file ends within it");
        let body = root_as_message(&batch[8..]).unwrap().bodyLength();
        let [negative, long] = [-1, i64::MAX].map(|length| stream.with(body, length));
        assert_eq!((negative.len(), long.len()), (1, 1), "the length of the body is there once");
        says(&negative[0], "its length is negative");
        says(&long[0], "the file ends within it");
    }

    #[test]
    fn batches_of_wrong_lengths_and_columns_of_other_types_are_refused() {
        let folder = Folder::new("arrow-batches");
        // The number of rows of the batch, and that of its column.
        let stream = ArrowStream::of(&[("x", Arc::new(Int8Array::from_iter_values((0..291).map(|i| i as i8))))]);
        let longer = stream.with(291, 292);
        assert!(longer.len() >= 2);
        let mut refused = 0;
        for bytes in longer {
            let rows = Arrow::open(folder.file("longer.arrow", bytes)).unwrap();
            for error in (0..rows.len()).filter_map(|row| rows.get(row).err()) {
                assert!(error.to_string().contains("longer.arrow: the record batch at byte"), "{error}");
                refused += 1;
            }
        }
        assert!(refused >= 2 * 291, "{refused}");
        let opened = stream.with(291, -1).into_iter().map(|bytes| Arrow::open(folder.file("less.arrow", bytes)));
        let errors: Vec<String> = opened.filter_map(|rows| Some(rows.err()?.to_string())).collect();
        assert!(errors.len() == 1 && errors[0].contains("less.arrow: the numbers of rows make no sense"), "{errors:?}");
        let day: ArrayRef = Arc::new(Date32Array::from(vec![3]));
        let stream = ArrowStream::of(&[("x", Arc::new(Int8Array::from(vec![7]))), ("day", day)]);
        let path = folder.file("days.arrow", [&stream.schema[..], &stream.batch, &stream.end].concat());
        let error = Arrow::open(&path).unwrap().get(0).unwrap_err().to_string();
        let words = "days.arrow: row 0: column `day`: values of type Date32 are not read: leave it out by `columns`";
        assert!(error.contains(words), "{error}");
        let row = Arrow::open(&path).unwrap().columns(&["x"]).unwrap().get(0).unwrap();
        assert_eq!(row.number("x").unwrap(), 7.0);
        let error = Arrow::open_all([&path, &references().join("file.arrow")]).err().unwrap().to_string();
        assert!(error.contains("file.arrow: its columns are not those of") && error.contains("days.arrow"), "{error}");
    }

    #[test]
    fn saved_datasets_are_read() {
        let rows = Arrow::open(references().join("saved")).unwrap();
        super::check_saved(&Arrow::open(references().join("file.arrow")).unwrap());
        let shards = [0, 1].map(|i| references().join(format!("saved/data-0000{i}-of-00002.arrow")));
        let texts = Arrow::open_all(&shards).unwrap().texts("text").unwrap();
        let read: Vec<String> =
            Loader::new(texts).batch(2).workers(3).epoch(0).unwrap().flat_map(|batch| batch.unwrap().data).collect();
        assert!(read.into_iter().eq((0..7).map(|i| format!("row {i}"))));
        // Rows are counted in their file.
        let error = rows.get(5).unwrap().number("text").unwrap_err().to_string();
        assert!(error.contains("data-00001-of-00002.arrow: row 1: field `text`"), "{error}");
        let chosen = Arrow::open(&shards[1]).unwrap().columns(&["label", "text"]).unwrap().get(0).unwrap();
        assert_eq!((chosen.number("label").unwrap(), chosen.text("text").unwrap()), (4.0, "row 4"));
        assert!(chosen.field("score").is_err());
        assert!(rows.get(7).is_err());
        assert_eq!(Arrow::open_all::<&Path>([]).unwrap().len(), 0);
    }

    #[test]
    fn files_that_are_refused() {
        let folder = Folder::new("arrow");
        let whole = fs::read(references().join("file.arrow")).unwrap();
        let says = |path: &Path, words: &str| {
            let error = Arrow::open(path).err().expect("an error").to_string();
            assert!(error.contains(words), "{error} should say {words}");
        };
        says(&references().join("dictionary.arrow"), "dictionary.arrow: the message at byte");
        says(&references().join("dictionary.arrow"), "write them as plain values");
        says(&references().join("compressed.arrow"), "compressed.arrow: the message at byte");
        says(&references().join("compressed.arrow"), "compressed batches are not read: write them without compression");
        says(&folder.file("cut.arrow", &whole[..3000]), "cut.arrow");
        says(
            &folder.file("none.arrow", "no table of any kind"),
            "none.arrow: the message at byte 0: it does not begin",
        );
        says(&folder.file("empty.arrow", ""), "empty.arrow: it has no schema");
        says(folder.as_ref(), "state.json");
        folder.file("state.json", "{\"_data_files\": [{\"name\": 1}]}");
        says(folder.as_ref(), "state.json: it has no list `_data_files`");
        folder.file("state.json", "{\"_data_files\": ");
        says(folder.as_ref(), "state.json: EOF while parsing");
        folder.file("state.json", "{\"_data_files\": [{\"filename\": \"data-1.arrow\"}]}");
        says(folder.as_ref(), "data-1.arrow: No such file");
        let error = Arrow::open(references().join("saved")).unwrap().columns(&["txt"]).err().unwrap().to_string();
        assert!(error.contains("no column `txt` among text, label, score"), "{error}");
        // A damaged file is an error, or has other values; nothing panics.
        for at in (0..whole.len()).step_by(3) {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x81;
            if let Ok(rows) = Arrow::open(folder.file("damaged.arrow", &damaged)) {
                (0..rows.len().min(7)).for_each(|i| drop(rows.get(i)));
            }
        }
    }
}

#[cfg(feature = "text")]
mod tokenizers {
    use data::{Dataset, InMemory, Loader, sources::Tokenizer};

    use crate::common::Folder;

    /// Byte pairs of four letters, with the merges `ab` and `abc`, and a special token.
    const JSON: &str = r#"{
        "version": "1.0", "truncation": null, "padding": null, "normalizer": {"type": "Lowercase"}, "pre_tokenizer": {"type": "Whitespace"},
        "added_tokens": [{"id": 6, "content": "<end>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
        "post_processor": null, "decoder": null,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "vocab": {"a": 0, "b": 1, "c": 2, "d": 3, "ab": 4, "abc": 5},
            "merges": [["a", "b"], ["ab", "c"]]}
    }"#;

    #[test]
    fn texts_become_tokens() {
        let folder = Folder::new("tokenizer");
        let tokenizer = Tokenizer::open(folder.file("tokenizer.json", JSON)).unwrap();
        assert_eq!((tokenizer.len(), tokenizer.token("<end>"), tokenizer.token("x")), (7, Some(6), None));
        assert_eq!(tokenizer.encode("ABC abd").unwrap(), [5, 4, 3]);
        assert_eq!(tokenizer.encode("ab<end>").unwrap(), [4, 6]);
        assert_eq!(tokenizer.decode(&[5, 3]).unwrap(), "abc d");
        let texts = InMemory::new(vec!["ab", "dd"]).map(move |text: &str| tokenizer.encode(text));
        let batch = Loader::new(texts).batch(2).epoch(0).unwrap().next().unwrap().unwrap();
        assert_eq!(batch.data, [vec![4], vec![3, 3]]);
        // A trainer's padding and truncation are not applied to texts. The largest token counts, holes included.
        let left = JSON
            .replace(r#""truncation": null"#, r#""truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}"#)
            .replace(r#""padding": null"#, r#""padding": {"strategy": {"Fixed": 5}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}"#)
            .replace(r#""abc": 5"#, r#""abc": 9"#);
        let tokenizer = Tokenizer::open(folder.file("left.json", format!("\u{feff}{left}"))).unwrap();
        for (text, due) in [("abc d d", vec![9, 3, 3]), ("a", vec![0])] {
            assert_eq!(tokenizer.encode(text).unwrap(), due);
            assert_eq!(tokenizer.encode_with_special(text).unwrap(), due);
            let places = tokenizer.encode_with_offsets(text).unwrap();
            assert_eq!(places.into_iter().map(|(token, _)| token).collect::<Vec<_>>(), due);
        }
        assert_eq!(tokenizer.len(), 10);
    }

    #[test]
    fn what_is_no_tokenizer_is_an_error() {
        let folder = Folder::new("no-tokenizer");
        for (name, text, due) in [
            ("a.json", "{", "no JSON"),
            ("b.json", "{\"model\": 3}", ""),
            ("c.json", "{\"a\": 1}", "there is no field `model`"),
            ("d.json", "[1]", "no JSON object"),
        ] {
            let error = Tokenizer::open(folder.file(name, text)).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("describes no tokenizer") && error.contains(due), "{error}");
        }
        let random = JSON.replace(r#""dropout": null"#, r#""dropout": 0.1"#);
        let error = Tokenizer::open(folder.file("random.json", &random)).unwrap_err().to_string();
        assert!(error.contains("random.json") && error.contains("`dropout` of 0.1"), "{error}");
        Tokenizer::open(folder.file("never.json", random.replace("0.1", "0.0"))).unwrap();
        assert!(Tokenizer::open(folder.path("none.json")).unwrap_err().to_string().contains("none.json"));
    }
}
