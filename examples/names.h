/* names.h - 421 given names for microgpt.c, and a reader for other lists
 * SPDX-License-Identifier: MIT OR Unlicense */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "plain_file.h"

static const char bundled_names[] =
    "aaron abigail ada adam adele adrian agnes aidan aisha alan albert alex alexa alfred ali alice alicia alina "
    "alma alva amalia amanda amara amber amelia amina amir amos amy ana anders andre andrea andrew angela anita ann "
    "anna annika anton antonia ariana ariel arjun arlo arnold aron arthur asha astrid audrey august aurora ava axel "
    "barbara beatrice bella ben benjamin bernard bertha beth bianca bjorn boris brenda brian brigid bruno caleb "
    "camila carl carla carlos carmen carol caroline casper cecilia celia charles charlotte chen chiara chloe "
    "christian christine clara claude claudia colin connor cora cornelia cyrus daisy dana daniel daniela darius "
    "david dean deborah delia della denis derek diana diego dina dominic dora doris dorothy dylan edgar edith edmund "
    "edward edwin eileen elaine elena eli elias elisa eliza elke ella ellen elliot eloise elsa elsie elvira emil "
    "emilia emily emma enzo eric erika erin ernest esme esther ethan eugene eva evan evelyn ezra fabian farah "
    "fatima felix fiona flora florence frances frank freya frida gabriel gavin gemma george gerda gilbert gina "
    "giulia gloria grace greta gustav hamza hana hanna hannah harold harriet harry hassan hazel heidi helen helena "
    "henrik henry hilda holly howard hugo ian ibrahim ida igor ilse ines ingrid irene iris isaac isabel ishaan ivan "
    "ivy jack jacob jade james jamila jan jana jane janet jasmine jason jean jens jeremy jesse jessica joan joel "
    "johan johanna john jonas jonathan jorge joseph josephine joyce juan judith julia julian juliet june kai karen "
    "karim karin karl kate katherine katya keith kenji kevin kira klaus kurt lara lars laura lea leah lena leo leon "
    "leona leonard liam lidia lila lily lina linda linus lisa liv lola lorenz louis louisa lucas lucia lucy ludwig "
    "luis luna lydia mabel madeline magda maia malik manuel mara marc marcel margaret maria marianne marie marina "
    "mario marion mark marta martha martin mary matilda matteo matthew maud maurice max maya megan melanie mia "
    "michael mila milan milena milo mina mira miriam mohammed mona monica morgan muriel nadia naomi natalie nathan "
    "neil nicholas nicola nina noah noel nora norman odette olga oliver olivia omar oscar otto owen pablo pamela "
    "patrick paul paula pedro penelope peter philip phoebe pia quentin rachel ralph ramona raphael raymond rebecca "
    "regina rita robert robin roland roman rosa rosalie rose ruby rufus ruth sabine sally samir samuel sandra sara "
    "selma serena silas simon sofia sonia sophie stella stephen susan sven sylvia tamara tara theodor theresa thomas "
    "tim tobias ulrich una ursula valentin vanessa vera victor victoria viola vivian walter wanda wilma yara yusuf "
    "zoe zora";

/* first: the first letter of each name, inside a text. */
static struct { const char **first; int count; } names;

/* Reads a file of names, at most 1 MiB. Returns "" on an error. */
static const char *read_names(const char *path) {
    static char text[1 << 20];
    FILE       *f = plain_open(path);
    if (f) text[fread(text, 1, sizeof text - 1, f)] = 0;
    if (f) fclose(f);
    return text;
}

static int is_letter(char c) { return c >= 'a' && c <= 'z'; }

/* Fills `names` from a text. A character that is not a lower-case letter ends a name. */
static void find_names(const char *text) {
    names.first = (const char **)malloc(sizeof *names.first * (strlen(text) / 2 + 1));
    for (int i = 0; names.first && text[i]; i++)
        if (is_letter(text[i]) && (i == 0 || !is_letter(text[i - 1]))) names.first[names.count++] = text + i;
}
