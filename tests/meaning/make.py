"""Write the files of this folder, most of them by the programs that write such files.

``python tests/meaning/make.py`` needs aeon, conllu, datasets, openpyxl, polars, scikit-learn, scipy,
sktime, soundfile, statsmodels and tslearn, and pandas and pyarrow.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import conllu
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import scipy.io.wavfile
import soundfile
import statsmodels.datasets
from aeon.datasets import save_to_ts_file
from datasets import Dataset
from sklearn.datasets import dump_svmlight_file, load_iris
from sktime.datasets import write_dataframe_to_tsfile, write_ndarray_to_tsfile
from tslearn.utils import save_time_series_txt, to_time_series_dataset

FILES = Path(__file__).parent / "files"
NUMBERS = np.random.default_rng(5)


def steps(lengths: list[int], channels: int = 1) -> list[np.ndarray]:
    """Return a walk of each length ``(L, channels)``, with two decimals."""
    return [NUMBERS.normal(size=(length, channels)).cumsum(0).round(2) for length in lengths]


def long_frame() -> pd.DataFrame:
    """Return rows of three sequences, shuffled, with dates and labels."""
    rows = [
        {"id": f"s{number}", "time": day, "x": x, "y": y, "kind": "up" if number % 2 else "down"}
        for number, walk in enumerate(steps([3, 1, 4], 2))
        for day, (x, y) in zip(pd.date_range("2024-02-27", periods=len(walk)), walk, strict=True)
    ]
    return pd.DataFrame(rows).sample(frac=1, random_state=2).reset_index(drop=True)


TEXTS = pd.DataFrame(
    {
        "text": ["guten Tag, Welt", 'a "good" day', "zwei\nZeilen", "one, two"],
        "label": ["de", "en", "de", "en"],
    }
)
LISTS = {"values": [walk[:, 0].tolist() for walk in steps([2, 5, 1, 3])], "kind": [0, 1, 1, 0]}


def by_pandas() -> None:
    """Tables as pandas writes them."""
    frame = long_frame()
    frame.to_csv(FILES / "pandas_index.csv")
    frame.to_csv(FILES / "pandas_semicolon.csv", sep=";", decimal=",", index=False)
    frame.to_csv(FILES / "pandas_tabs.tsv", sep="\t", index=False, na_rep="NaN")
    frame.to_csv(FILES / "pandas.csv.gz", index=False)
    frame.to_csv(FILES / "pandas_utf16.csv", sep="\t", index=False, encoding="utf-16")
    frame.to_parquet(FILES / "pandas.parquet")
    for orient in ("columns", "index", "split", "table", "records"):
        TEXTS.to_json(FILES / f"pandas_{orient}.json", orient=orient)
    frame.to_json(FILES / "pandas_lines.jsonl", orient="records", lines=True, date_format="iso")
    days = pd.date_range("2024-03-01", periods=6, name="Date")
    levels = pd.MultiIndex.from_product(
        [["Close", "Volume"], ["AAA", "BBB"]], names=["Price", "Ticker"]
    )
    pd.DataFrame(NUMBERS.normal(size=(6, 4)).round(2), days, levels).to_csv(
        FILES / "pandas_levels.csv"
    )
    panel = frame.rename(columns={"id": "unique_id", "time": "ds", "x": "y", "y": "z"})
    panel.drop(columns="kind").sort_values(["ds", "unique_id"]).to_csv(
        FILES / "panel.csv", index=False
    )
    wide = pd.DataFrame(NUMBERS.normal(size=(4, 5)).round(2), columns=[f"t{n}" for n in range(5)])
    wide.iloc[1, 3:] = np.nan
    wide.insert(0, "kind", ["a", "b", "a", "b"])
    wide.to_csv(FILES / "pandas_wide.csv", index=False)
    frame.to_excel(FILES / "openpyxl.xlsx", index=False)
    frame.to_pickle(FILES / "pandas.pkl")
    # The index of dates has no name; the newest are first.
    days = pd.date_range("2024-01-01", periods=6)[::-1]
    series = pd.DataFrame({"load": np.arange(6) / 8, "price": np.arange(6) * 1000.5}, index=days)
    series.to_csv(FILES / "pandas_dates.csv")
    marked = series.assign(price=[f"{price:,.2f}" for price in series["price"]])
    marked.to_csv(FILES / "pandas_thousands.csv", index_label="date")
    lists = pd.DataFrame({"id": ["a", "b"], "x": [[0.5, 1.0], [1.5]], "label": ["u", "v"]})
    lists.to_csv(FILES / "pandas_lists.csv", index=False)
    (FILES / "pandas_text.txt").write_text(frame[["x", "y"]].to_string(index=False) + "\n")


def by_polars() -> None:
    """Tables as polars writes them."""
    frame = pl.from_pandas(long_frame()).with_columns(pl.col("time").cast(pl.Date))
    frame = frame.with_columns(
        pl.when(pl.col("x") < 0).then(None).otherwise(pl.col("x")).alias("x")
    )
    frame.write_csv(FILES / "polars.csv")
    frame.write_ndjson(FILES / "polars.ndjson")
    frame.write_ipc(FILES / "polars.arrow")
    pl.DataFrame(LISTS).write_parquet(FILES / "polars_lists.parquet")


def by_arrow() -> None:
    """Tables as pyarrow and datasets write them."""
    table = pa.Table.from_pandas(long_frame(), preserve_index=False)
    table = table.set_column(0, "id", table.column("id").dictionary_encode())
    pa.parquet.write_table(table, FILES / "arrow_dictionary.parquet")
    pa.feather.write_feather(table, FILES / "arrow.feather")
    pa.csv.write_csv(pa.Table.from_pandas(TEXTS), FILES / "arrow_texts.csv")
    words = {
        "tokens": [["EU", "rejects", "it"], ["Peter"], ["in", "Rome"]],
        "ner_tags": [[3, 0, 0], [1], [0, 5]],
    }
    data = Dataset.from_dict(words)
    data.save_to_disk(FILES / "datasets_folder")
    data.to_json(FILES / "datasets.jsonl")
    (FILES / "datasets_columns.json").write_text(json.dumps(data.to_dict()))
    Dataset.from_pandas(TEXTS).to_csv(FILES / "datasets.csv", index=False)


def by_archives_of_series() -> None:
    """Files of aeon, sktime and tslearn, and of the archives that they read."""
    equal = np.stack(steps([6, 6, 6, 6], 2)).transpose(0, 2, 1)
    labels = np.array(["p", "q", "p", "q"])
    kinds = {"label_type": "classification", "path": str(FILES)}
    unequal = [walk.T for walk in steps([3, 5, 2], 2)]
    save_to_ts_file(equal, labels, problem_name="aeon_equal", **kinds)
    save_to_ts_file(unequal, labels[:3], problem_name="aeon_unequal", **kinds)
    write_ndarray_to_tsfile(
        equal, FILES, "sktime_equal", class_label=["p", "q"], class_value_list=labels
    )
    nested = pd.DataFrame({"dim_0": [pd.Series(walk[:, 0]) for walk in steps([4, 2, 3])]})
    write_dataframe_to_tsfile(
        nested, FILES, "sktime_nested", class_label=["p", "q"], class_value_list=labels[:3]
    )
    for folder in ("sktime_equal", "sktime_nested"):
        for file in (FILES / folder).iterdir():
            shutil.move(file, FILES / f"{folder}.ts")
        (FILES / folder).rmdir()
    padded = to_time_series_dataset(steps([3, 5, 4], 2))
    np.savez(FILES / "tslearn_padded.npz", x=padded, label=labels[:3])
    save_time_series_txt(str(FILES / "tslearn.txt"), padded)
    rows = np.column_stack([[1, 2, 1, 2, 1], np.stack(steps([12] * 5))[..., 0]])
    short = rows.copy()
    short[1, 9:] = np.nan
    np.savetxt(FILES / "ucr_TRAIN.tsv", short, fmt="%g", delimiter="\t")
    np.savetxt(FILES / "ucr_2015.txt", rows, fmt="%.7e", delimiter="   ")
    attributes = "".join(f"@attribute att{n} numeric\n" for n in range(6))
    lines = [
        ",".join(map(str, walk[0])) + f",{label}\n"
        for walk, label in zip(equal, labels, strict=True)
    ]
    (FILES / "ucr.arff").write_text(
        f"% GunPoint\n@relation Ucr\n{attributes}@attribute target {{p,q}}\n@data\n{''.join(lines)}"
    )
    relational = "\n".join(
        "'" + "\\n".join(",".join(map(str, channel)) for channel in walk.T) + f"',{label}"
        for walk, label in zip(steps([4, 4, 4], 3), labels, strict=False)
    )
    (FILES / "uea.arff").write_text(
        "@relation Uea\n@attribute rel relational\n"
        + "".join(f"\t@attribute att{n} numeric\n" for n in range(4))
        + f"@end rel\n@attribute classAttribute {{p,q}}\n@data\n{relational}\n"
    )


def by_statistics() -> None:
    """Series of statsmodels, and tables of NumPy and scikit-learn."""
    spots = statsmodels.datasets.sunspots.load_pandas().data[:30]
    spots.to_csv(FILES / "statsmodels_sunspots.csv", index=False)
    co2 = statsmodels.datasets.co2.load_pandas().data[:30]
    co2.to_csv(FILES / "statsmodels_co2.csv")
    np.savetxt(
        FILES / "numpy_header.txt",
        np.column_stack([np.arange(9), steps([9], 2)[0]]),
        header="t u v",
    )
    np.savetxt(
        FILES / "numpy.csv", np.column_stack([np.arange(9), steps([9], 2)[0]]), delimiter=","
    )
    iris, kinds = load_iris(return_X_y=True)
    dump_svmlight_file(iris[:5], kinds[:5], str(FILES / "sklearn.svmlight"))


def write(files: dict[str, str]) -> None:
    """Write texts to files in folders."""
    for name, content in files.items():
        path = FILES / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def by_sound() -> None:
    """Recordings."""
    for number, (length, label) in enumerate(((40, "yes"), (25, "no"), (31, "yes"))):
        folder = FILES / "sound_classes" / label
        folder.mkdir(parents=True, exist_ok=True)
        soundfile.write(
            folder / f"{number}_nohash_0.wav", NUMBERS.uniform(-1, 1, (length, 2)), 8000
        )
    (FILES / "sound_names").mkdir(exist_ok=True)
    for name, length in (("0_jackson_0", 20), ("1_theo_3", 15), ("0_theo_2", 18)):
        samples = NUMBERS.integers(-(2**15), 2**15, length).astype(np.int16)
        scipy.io.wavfile.write(FILES / "sound_names" / f"{name}.wav", 8000, samples)


def by_taggers() -> None:
    """Words with labels."""
    tree = conllu.parse(
        "# sent_id = a\n1-2\tvamonos\t_\t_\t_\t_\t_\t_\t_\t_\n1\tvamos\tir\tVERB\t_\t_\t0\troot\t_\t_\n"
        "2\tnos\tnos\tPRON\t_\tCase=Acc\t1\tobj\t_\t_\n\n"
        "# sent_id = b\n1\tsi\tsi\tINTJ\t_\t_\t0\troot\t_\t_\n1.1\tno\tno\tX\t_\t_\t_\t_\t0:x\t_\n\n"
    )
    write(
        {
            "conllu.conllu": "".join(sentence.serialize() for sentence in tree),
            "conll2003.txt": "-DOCSTART- -X- -X- O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\n"
            "Peter NNP B-NP B-PER\nBlackburn NNP I-NP I-PER\n\n",
            "germeval.iob2": "#\thttp://x [2010]\n1\tSchartau\tB-PER\tO\n2\tsagte\tO\tO\n\n"
            "1\tRom\tB-LOC\tB-LOCderiv\n",
            "wnut17.conll": "@paul\tO\n#Ebola\tB-product\n\n#\tO\nnow\tO\n",
            "mit_movies.bio": "B-Actor\tbrad\nI-Actor\tpitt\nO\tfilm\n\nO\tshow\n",
        }
    )


def by_hand() -> None:
    """Files of archives and programs that no package of Python writes."""
    hours = pd.date_range("2024-01-31 22:00", periods=5, freq="h")
    power = [f"{h:%d/%m/%Y;%H:%M:%S};{n}.5;{'?' if n == 2 else n}" for n, h in enumerate(hours)]
    jena = [f"{h:%d.%m.%Y %H:%M:%S},{990 + n}.25,{n}.5" for n, h in enumerate(hours)]
    load = [f'"{h:%Y-%m-%d %H:%M:%S}";{n},5;{n},25' for n, h in enumerate(hours)]
    ecg = [",".join(f"{n + s * 0.5:.2e}" for s in range(5)) + f",{n % 2}.0e+00" for n in range(4)]
    write(
        {
            "power.txt": "Date;Time;Power;Volt\n" + "\n".join(power) + "\n",
            "jena.csv": '"Date Time","p (mbar)","T (degC)"\n' + "\n".join(jena) + "\n",
            "electricity.txt": '"";"MT_001";"MT_002"\n' + "\n".join(load) + "\n",
            "logger.csv": "Station 7\nMade 2024\n\ntime,temp,wind\n,°C,m/s\n"
            + "".join(f"{h:%Y-%m-%dT%H:%M},{n}.5,{n}\n" for n, h in enumerate(hours)),
            "excel.csv": "sep=;\nid;t;x;kind\na;0;0,5;p\na;1;1,5;p\nb;0;2,5;q\n",
            "ecg_no_header.csv": "\n".join(ecg) + "\n",
            "silso.csv": "".join(f"1749;{m:02};1749.{m};{m}.5\n" for m in range(1, 8)),
            "gluonts.jsonl": '{"start": "2024-01-01", "target": [1.0, 2.0, 3.5], "item_id": "A"}\n'
            '{"start": "2024-01-01", "target": [4.0, 5.5], "item_id": "B"}\n',
            "m4.csv": '"V1","V2","V3","V4"\n"Y1",1.5,2.5,3.5\n"Y2",4.5,5.5,""\n',
            "traffic.csv": "Page,2015-07-01,2015-07-02,2015-07-03\na_en,1,2,3\nb_en,4,,6\nc_en,7,8,9\n",
            "physionet/p1.psv": "HR|O2Sat|SepsisLabel\nNaN|97|0\n80|98|0\n81|NaN|1\n",
            "physionet/p2.psv": "HR|O2Sat|SepsisLabel\n70|95|0\n",
            "imdb/pos/0_9.txt": "A fine film.",
            "imdb/pos/1_7.txt": "See it <br /> twice",
            "imdb/neg/0_2.txt": "Dull",
            "imdb/unsup/0_0.txt": "Hm",
            "imdb/urls_pos.txt": "http://x\nhttp://y\n",
            "news/sci.med/57110": "From: me\n\nA doctor says",
            "news/alt.atheism/51060": "Subject: FAQ",
            "har/Walking/w1.txt": "".join(f"{n} {n + 1} {n + 2}\n" for n in range(6)),
            "har/Sitting/s1.txt": "".join(f"{n} 0 1\n" for n in range(4)),
            "names/Polish.txt": "Nowak\nZak\n",
            "names/Arabic.txt": "Nasr\n",
            "tatoeba.tsv": "source\ttarget\nGo.\tGeh.\nHi there\tHallo\n",
            "store.csv": "country,store,day,sold\n"
            + "".join(
                f"{c},{s},2024-01-0{d},{d + len(c) + ord(s)}\n"
                for d in (1, 2, 3)
                for c in ("FI", "NOR")
                for s in "AB"
            ),
            "spans.jsonl": '{"text": "Ann is in Rome", "label": [[0, 3, "PER"], [10, 14, "LOC"]]}\n'
            '{"text": "no", "label": []}\n',
        }
    )


def _folders() -> Iterator[Path]:
    yield from (path for path in FILES.iterdir() if path.is_dir())


def main() -> None:
    """Write all files."""
    shutil.rmtree(FILES, ignore_errors=True)
    FILES.mkdir()
    for function in (
        *(by_pandas, by_polars, by_arrow, by_archives_of_series, by_statistics, by_sound),
        *(by_taggers, by_hand),
    ):
        function()


if __name__ == "__main__":
    main()
