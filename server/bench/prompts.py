"""Synthetic prompts: random common words, sized in the server's own tokens.

The client has no tokenizer of the server, so it asks: two probes of different length give tokens a word and the tokens
that every prompt costs besides (BOS, chat template), and lengths in tokens become lengths in words.
"""

from dataclasses import dataclass
from random import Random

_WORD_LIST = """
able about above across after again air all almost along also always and animal another answer any area around ask
away back base because become bed been before began begin behind being below best better between big bird black blue
boat body book both box boy bring brought build busy but call came can car care carry cause center change check city
class clear close cold color come common complete could country course cover cross cut dark day decide deep did differ
do dog door down draw drive dry during each early earth ease east eat end enough even ever every example eye face fact
fall family far farm fast father feel feet few field figure fill final find fine fire first fish five fly follow food
foot for force form four free friend from front full game gave general get girl give go gold good got govern great
green ground group grow had half hand happen hard has have he head hear heat help her here high him his hold home
horse hot hour house how hundred idea if in inch interest is island just keep kind king knew know land language large
last late laugh lead learn leave left less let letter life light like line list listen little live long look lot love
low machine made main make man many map mark may mean measure men might mile mind minute miss money moon more morning
most mother mountain move much music must name near need never new next night north note nothing notice now number
object of off often oh old on once one only open or order other our out over own page paper part pass pattern people
perhaps person picture piece place plain plan plane plant play point port pose possible pound power press problem
produce product pull put question quick rain ran reach read ready real record red remember rest right river road rock
room round rule run said same saw say school science sea second see seem self sentence serve set several shape she
ship short should show side simple since sing size sleep slow small snow so some song soon sound south space special
spell stand star start state stay step still stood stop story street strong study such sun sure surface table tail
take talk teach tell ten test than that the their them then there these they thing think this those though thought
thousand three through time to together told too took top toward town travel tree true try turn two under unit until
up us use usual very voice vowel wait walk want war warm was watch water way we week weight well went were west what
wheel when where which while white who whole why will wind with wonder wood word work world would write year yes yet
you young your
"""
WORDS = tuple(_WORD_LIST.split())
"""Short common words: most tokenizers have each as one token, so that a length in words is nearly one in tokens."""


def words(count: int, rng: Random) -> str:
    """*count* random words. Two draws share a few leading words at most, so none is found in a prefix cache."""
    return " ".join(rng.choices(WORDS, k=count))


@dataclass(frozen=True, slots=True)
class Calibration:
    """tokens = base_tokens + tokens_per_word · words"""

    tokens_per_word: float = 1.0
    base_tokens: float = 0.0
    measured: bool = False
    """False: the server reports no usage, and one word is taken for one token."""

    def words_for(self, tokens: int) -> int:
        """Words of a whole prompt that the server counts as about *tokens*; at least one."""
        return max(1, round((tokens - self.base_tokens) / self.tokens_per_word))

    def words_in(self, tokens: int) -> int:
        """Words that add about *tokens* to a prompt."""
        return round(tokens / self.tokens_per_word)


def calibrate(short: tuple[int, int], long: tuple[int, int]) -> Calibration:
    """From two probes, each (words, prompt tokens). Falls back to one token a word where they make no line."""
    (short_words, short_tokens), (long_words, long_tokens) = short, long
    tokens_per_word = (long_tokens - short_tokens) / (long_words - short_words)
    if tokens_per_word <= 0:
        return Calibration()
    return Calibration(tokens_per_word, short_tokens - tokens_per_word * short_words, measured=True)
