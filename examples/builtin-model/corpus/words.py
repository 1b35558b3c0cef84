"""Words, names and values: the raw material of every generated dialogue.

A value is *held out* when the CRC of its text falls in one bucket of ten. A training `Pool` never
draws held-out values, an evaluation `Pool` draws only those, so that the names and values that the
evaluation asks to copy were never seen in training. The everyday words below are shared: a model
that never met the word "kitchen" would know nothing about its token.
"""

from __future__ import annotations

import random
import re
import string
import sysconfig
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from zlib import crc32

HELD_OUT_BUCKETS = 10


def is_held_out(text: str) -> bool:
    """True when this word, name or file belongs to the evaluation."""
    return crc32(text.encode()) % HELD_OUT_BUCKETS == 0


CATEGORIES: dict[str, str] = {
    "fruit": "apple banana cherry grape lemon mango melon orange peach pear plum fig kiwi lime "
    "papaya apricot coconut date guava raspberry strawberry blueberry blackberry nectarine quince",
    "vegetable": "carrot potato onion tomato pepper cabbage spinach lettuce broccoli celery garlic "
    "leek pea bean radish turnip pumpkin cucumber beet corn kale squash zucchini fennel",
    "animal": "cat dog horse cow sheep goat fox wolf bear lion tiger rabbit mouse otter badger deer "
    "owl eagle crow duck goose swan frog toad snake lizard turtle whale dolphin shark seal crab "
    "bee ant spider camel zebra giraffe monkey hedgehog squirrel beaver sparrow robin penguin",
    "color": "red blue green yellow purple orange pink brown black white gray silver gold violet "
    "teal cyan magenta indigo crimson beige",
    "object": "table chair lamp desk book pen pencil paper bag box cup plate spoon fork knife bowl "
    "bottle key lock door window clock mirror phone camera radio keyboard screen cable battery "
    "hammer nail saw rope ladder bucket brush broom candle blanket pillow basket coat hat glove "
    "shoe sock scarf umbrella ticket coin wallet stamp letter map compass tent drum guitar violin "
    "piano bicycle wheel engine anchor boat sail train bus car truck",
    "place": "garden kitchen office library museum station airport harbor market bridge castle tower "
    "forest river lake mountain valley island beach desert village city school hospital church "
    "theater cinema hotel cafe bakery farm factory warehouse garage cellar attic roof balcony",
    "adjective": "small big old new young tall short long wide narrow fast slow hot cold warm cool "
    "bright dark loud quiet happy sad brave shy clever lazy busy calm proud kind gentle strong weak "
    "clean dirty empty full heavy light soft hard smooth rough sweet sour bitter fresh dry wet sharp "
    "round flat deep shallow rich poor early late easy simple strange golden wooden tiny huge",
    "verb": "open close start stop send read write find search list get set create delete update add "
    "remove check copy move rename load save print play pause book cancel order buy sell pay track "
    "count sort merge split compare convert translate schedule invite assign notify report measure "
    "monitor install deploy restart backup restore upload download resize rotate crop filter publish "
    "archive lock unlock enable disable connect disconnect verify validate register reserve rate "
    "review summarize lookup fetch compute estimate plan draw render query import export scan",
    "noun": "file folder user account order invoice payment ticket event meeting reminder note task "
    "project message email contact group channel post comment photo image video song playlist album "
    "movie recipe product item price stock package shipment flight hotel room table seat reservation "
    "report chart dataset record column row server database backup job queue process container "
    "service device sensor light thermostat alarm door camera printer route address location weather "
    "forecast temperature distance currency rate loan budget expense customer supplier employee team "
    "department shift course lesson student grade book article page document contract license key "
    "token session password setting theme font label tag branch commit release issue bug build test",
    "first_name": "Alice Bob Carol David Emma Frank Grace Henry Irene Jack Karen Leo Maria Nina Oscar "
    "Paul Quinn Rosa Sam Tina Uma Victor Wendy Xavier Yara Zoe Adam Bella Carlos Diana Elias Fatima "
    "George Hannah Ivan Julia Kofi Laura Marco Nadia Olga Pedro Ravi Sofia Tom Ursula Vera Walter "
    "Anna Ben Clara Daniel Eva Felix Gina Hugo Ines Jonas Kate Liam Mila Noah Omar Petra Rita Simon",
    "last_name": "Smith Jones Brown Miller Davis Garcia Wilson Moore Taylor Thomas Martin Lee Clark "
    "Lewis Walker Hall Young King Wright Hill Green Baker Adams Nelson Carter Turner Parker Evans "
    "Collins Stewart Morris Rogers Reed Cook Morgan Bell Murphy Bailey Cooper Kim Silva Rossi Weber "
    "Novak Kowalski Tanaka Sato Patel Khan Singh Chen Wang Ito Haddad Okafor Mensah Larsen Berg",
    "city": "Paris London Berlin Madrid Rome Vienna Prague Warsaw Lisbon Dublin Oslo Stockholm "
    "Helsinki Athens Budapest Brussels Amsterdam Zurich Geneva Munich Hamburg Milan Naples Venice "
    "Barcelona Porto Lyon Nice Boston Chicago Denver Seattle Austin Dallas Miami Atlanta Toronto "
    "Montreal Vancouver Tokyo Osaka Kyoto Seoul Beijing Shanghai Delhi Mumbai Bangkok Hanoi Jakarta "
    "Manila Sydney Melbourne Auckland Cairo Nairobi Lagos Accra Lima Bogota Santiago Quito Havana",
    "country": "France Germany Spain Italy Portugal Austria Poland Norway Sweden Finland Greece Ireland "
    "Japan China India Thailand Vietnam Brazil Chile Peru Mexico Canada Kenya Ghana Egypt Morocco",
    "weekday": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "month": "January February March April May June July August September October November December",
    "language": "English French German Spanish Italian Portuguese Dutch Swedish Polish Greek Turkish "
    "Arabic Hindi Japanese Korean Chinese Finnish Danish Czech",
    "currency": "USD EUR GBP JPY CHF CAD AUD SEK NOK DKK PLN CZK INR CNY BRL MXN ZAR KRW",
    "food": "soup salad pizza pasta rice bread cheese cake pie sandwich omelette curry stew pancake "
    "noodles dumplings burger taco porridge risotto lasagna sushi",
    "job": "teacher doctor nurse baker farmer pilot sailor painter singer dancer writer lawyer judge "
    "engineer carpenter plumber gardener librarian cook waiter driver mechanic tailor",
}
WORDS: dict[str, list[str]] = {name: text.split() for name, text in CATEGORIES.items()}
COMMON = sorted(
    {
        w
        for k in ("fruit", "vegetable", "animal", "color", "object", "place", "food", "job")
        for w in WORDS[k]
    }
)
NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()
SMALL_WORDS = "the a and I you we it is are was like have want to of in on for with not my your this that they he she can will go see made over under".split()
EXTENSIONS = "txt csv json md py log pdf png jpg mp3 zip xml html yaml toml docx".split()
DOMAINS = "example.com mail.test corp.test post.example shop.example team.test".split()
STATUSES = (
    "pending active closed draft open done failed running archived shipped paid overdue".split()
)

_ONSETS = "b bl br c ch cr d dr f fl g gl gr h j k kl l m n p pl pr qu r s sh sk sl st t tr v w y z".split()
_VOWELS = "a e i o u a e i o ai ea oo ou".split()
_CODAS = ["", "", "", "n", "r", "l", "s", "t", "x", "m", "nd", "rk", "lt", "sh", "ck"]


LIBRARY_WORD = re.compile(r"[a-z]{3,11}")


@lru_cache(maxsize=2)
def library_words(held_out: bool) -> tuple[str, ...]:
    """Words that occur at least three times in the running Python's own sources."""
    counts: Counter[str] = Counter()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        counts.update(LIBRARY_WORD.findall(path.read_text(encoding="utf-8", errors="ignore")))
    return tuple(w for w, n in sorted(counts.items()) if n >= 3 and is_held_out(w) == held_out)


class Pool:
    """Draws values from one side of the split. `rng` makes it reproducible."""

    def __init__(self, rng: random.Random, held_out: bool = False):
        self.rng = rng
        self.held_out = held_out

    # -- words ---------------------------------------------------------------------------------
    def word(self, category: str) -> str:
        return self.rng.choice(WORDS[category])

    def words(self, category: str, n: int) -> list[str]:
        return self.rng.sample(WORDS[category], n)

    def _fresh(self, make: Callable[[], str]) -> str:
        """First value of `make` that lies on this pool's side of the split."""
        for _ in range(200):
            value = make()
            if is_held_out(value) == self.held_out:
                break
        return value

    def _syllables(self) -> str:
        n = self.rng.choice((1, 2, 2, 2, 3))
        choice = self.rng.choice
        return "".join(choice(_ONSETS) + choice(_VOWELS) + choice(_CODAS) for _ in range(n))

    def invented(self) -> str:
        """A pronounceable word that means nothing, such as `blouter`."""
        return self._fresh(self._syllables)

    def any_word(self) -> str:
        """An everyday word, a word of Python's sources, or an invented one."""
        roll = self.rng.random()
        if roll < 0.3:
            return self.rng.choice(COMMON)
        return self.rng.choice(library_words(self.held_out)) if roll < 0.6 else self.invented()

    def letters(self, low: int = 3, high: int = 8) -> str:
        rng = self.rng
        return "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(low, high)))

    # -- values --------------------------------------------------------------------------------
    def person(self) -> str:
        rng = self.rng
        first = self.word("first_name") if rng.random() < 0.7 else self.invented().capitalize()
        if rng.random() < 0.5:
            return first
        last = self.word("last_name") if rng.random() < 0.6 else self.invented().capitalize()
        return f"{first} {last}"

    def city(self) -> str:
        if self.rng.random() < 0.65:
            return self.word("city")
        return self.invented().capitalize() + self.rng.choice(
            ("", "", "ville", "burg", " Bay", "ton")
        )

    def code(self) -> str:
        """An identifier such as `ORD-48213`, `b7f02c` or `tk_9921`."""
        rng = self.rng
        prefix = "".join(rng.choice(string.ascii_uppercase) for _ in range(rng.randint(1, 4)))
        digits = "".join(rng.choice(string.digits) for _ in range(rng.randint(2, 6)))
        hexa = "".join(rng.choice("0123456789abcdef") for _ in range(rng.randint(5, 8)))
        shapes = (
            f"{prefix}-{digits}",
            f"{prefix}{digits}",
            hexa,
            f"{prefix.lower()}_{digits}",
            digits,
        )
        return rng.choice(shapes)

    def integer(self) -> int:
        rng = self.rng
        high = rng.choice((9, 20, 60, 100, 500, 1000, 9999, 50000))
        return rng.randint(1, high)

    def decimal(self) -> float:
        rng = self.rng
        return round(rng.uniform(0, rng.choice((1, 10, 100, 1000))) + 0.01, rng.choice((1, 2, 2)))

    def email(self) -> str:
        rng = self.rng
        left = rng.choice((self.word("first_name").lower(), self.invented(), self.any_word()))
        right = (
            rng.choice(DOMAINS)
            if rng.random() < 0.5
            else f"{self.invented()}.{rng.choice(('com', 'org', 'net', 'io'))}"
        )
        return (
            f"{left}{rng.choice(('', '', '.' + self.invented(), str(rng.randint(1, 99))))}@{right}"
        )

    def date(self) -> str:
        rng = self.rng
        return f"{rng.randint(1990, 2035)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"

    def time(self) -> str:
        return f"{self.rng.randint(0, 23):02}:{self.rng.choice((0, 0, 15, 30, 45, self.rng.randint(0, 59))):02}"

    def filename(self) -> str:
        rng = self.rng
        stem = rng.choice(
            (
                self.any_word(),
                f"{self.any_word()}_{self.any_word()}",
                f"{self.any_word()}{rng.randint(1, 99)}",
            )
        )
        return f"{stem}.{rng.choice(EXTENSIONS)}"

    def path(self) -> str:
        rng = self.rng
        parts = [self.any_word() for _ in range(rng.randint(1, 3))]
        root = rng.choice(("/", "/home/", "/data/", "", "~/", "/var/"))
        return root + "/".join(parts) + "/" + self.filename()

    def url(self) -> str:
        rng = self.rng
        return f"https://{self.invented()}.{rng.choice(('com', 'org', 'net', 'io', 'dev'))}/{self.any_word()}"

    def phrase(self) -> str:
        """Two to six words: a title, a note, a search."""
        rng = self.rng
        kinds: Sequence[Callable[[], str]] = (
            lambda: f"{self.word('adjective')} {self.word('object')}",
            lambda: f"buy {self.word('food')} and {self.word('fruit')}",
            lambda: f"call {self.word('first_name')} about the {self.word('noun')}",
            lambda: (
                f"the {self.word('adjective')} {self.word('animal')} in the {self.word('place')}"
            ),
            lambda: f"{self.any_word()} {self.any_word()} {self.any_word()}",
            lambda: f"{self.word('verb')} the {self.word('noun')} for {self.word('first_name')}",
            lambda: f"{self.invented()} {self.word('noun')} {self.word('verb')}",
        )
        return rng.choice(kinds)()

    def sentence(self) -> str:
        """One plain sentence with a full stop."""
        rng = self.rng
        adj, animal, obj = self.word("adjective"), self.word("animal"), self.word("object")
        name, place, food = self.word("first_name"), self.word("place"), self.word("food")
        shapes = (
            f"The {adj} {animal} sleeps near the {place}.",
            f"{name} left the {obj} in the {place}.",
            f"We need {rng.randint(2, 40)} {obj}s for the {place}.",
            f"{name} is a {self.word('job')} from {self.city()}.",
            f"Every {self.word('weekday')} {name} cooks {food} for the {self.word('job')}.",
            f"My {obj} is {self.word('color')} and my {self.word('object')} is {self.word('color')}.",
            f"The {self.invented()} costs {rng.randint(2, 900)} dollars.",
            f"I saw a {adj} {animal} and a {self.word('adjective')} {self.word('animal')}.",
            f"The {self.word('noun')} {self.code()} was sent to {name} on {self.date()}.",
            f"In {self.word('month')} the {place} is {adj}.",
        )
        return rng.choice(shapes)

    def free_text(self) -> str:
        """Words in no grammar at all, with the punctuation that people type."""
        rng = self.rng
        words = [
            rng.choice(SMALL_WORDS) if rng.random() < 0.4 else self.any_word()
            for _ in range(rng.randint(2, 9))
        ]
        if rng.random() < 0.3:
            words.insert(rng.randrange(len(words)), str(self.integer()))
        if rng.random() < 0.6:
            words[0] = words[0].capitalize()
        if rng.random() < 0.3:
            words[rng.randrange(len(words) - 1)] += ","
        return " ".join(words) + rng.choice((".", "!", "?", "", "", "...", "!!"))

    def paragraph(self) -> str:
        return " ".join(self.sentence() for _ in range(self.rng.randint(2, 5)))

    # -- identifiers ---------------------------------------------------------------------------
    def identifier(self) -> str:
        """A variable name in snake case."""
        return self._fresh(self._joined_words)

    def _joined_words(self) -> str:
        rng = self.rng
        first = rng.choice(
            (self.word("noun"), self.word("object"), self.any_word(), self.invented())
        )
        second = rng.choice((self.word("noun"), self.any_word(), self.invented()))
        return rng.choice((first, f"{first}_{second}", f"{self.word('adjective')}_{second}"))
